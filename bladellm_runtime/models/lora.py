"""Slots for adapters beside a decoder's weights: where A and B of every layer lie, and the layers that read them."""

from collections.abc import Mapping

import torch

from bladellm_runtime.layers.linear import Linear, LinearLayer
from bladellm_runtime.layers.lora import (
    ColParaLinearWithLoRA,
    ColParaLinearWithSliceLoRA,
    LinearWithLoRA,
    LoraState,
    QKVProjectionWithLoRA,
    RowParaLinearWithLoRA,
)
from bladellm_runtime.layers.stacked_lora import LoraWeights
from bladellm_runtime.models.lora_layout import LoraLayout, LoraShape
from bladellm_runtime.models.weights import WeightTable

KINDS: dict[str, type[LinearWithLoRA]] = {
    "qkv": QKVProjectionWithLoRA,
    "output": RowParaLinearWithLoRA,
    "gate_up": ColParaLinearWithSliceLoRA,
    "down": RowParaLinearWithLoRA,
}
"""By the decoder's name of a layer; others are column-parallel layers of one part."""


class LoraMemory:
    """`max_loras` slots for adapters on a device, and the state that the layers which read them share.

    numbers: [slots, held], what the slots have in common memory; scales: float32 [slots, scales]; the A of stacked
    layers lies behind their weights. A slot that nothing was copied to adds nothing.
    """

    def __init__(
        self, table: WeightTable, shape: LoraShape, device: torch.device, stacked: Mapping[str, int] | None = None
    ) -> None:
        """stacked: rows behind the weights of those layers, by name, that `wrap` is going to be given."""
        self.layout = LoraLayout(table, shape.max_rank, stacked)
        self.numbers = torch.zeros(shape.max_loras, self.layout.held, dtype=shape.dtype, device=device)
        self.scales = torch.zeros(shape.max_loras, self.layout.scales, device=device)
        self.state = LoraState()
        self.bytes = lora_bytes(table, shape, stacked)
        self._stacked: dict[str, torch.Tensor] = {}

    @property
    def max_loras(self) -> int:
        return len(self.numbers)

    @property
    def matrices(self) -> list[torch.Tensor]:
        """All memory that holds A and B, a slot along the first dimension."""
        return [self.numbers, *self._stacked.values()]

    def write(self, slot: int, numbers: torch.Tensor, scales: torch.Tensor, non_blocking: bool = False) -> None:
        """Copy an adapter, as the layout says, to a slot: numbers [numbers], scales [scales]."""
        self.numbers[slot].copy_(numbers[: self.layout.held], non_blocking=non_blocking)
        for name in self.layout.stacked:
            a = self.layout.a_view(self.layout.places[name], numbers)
            self._stacked[name][slot].copy_(a, non_blocking=non_blocking)
        self.scales[slot].copy_(scales, non_blocking=non_blocking)

    def wrap(self, linears: dict[str, LinearLayer]) -> dict[str, LinearLayer]:
        """The layers, those of the table with what adapters add."""
        return linears | {name: self._layer(name, linears[name]) for name in self.layout.places}

    def _layer(self, name: str, layer: LinearLayer) -> LinearWithLoRA:
        place = self.layout.places[name]
        if name in self.layout.stacked:
            a = self._stacked[name] = self._behind(name, layer)
        else:
            a = self.layout.a_view(place, self.numbers)
        b = self.layout.b_view(place, self.numbers)
        scales = self.scales[:, place.scale : place.scale + len(place.parts)]
        kind = KINDS.get(name.rpartition(".")[2], ColParaLinearWithLoRA)
        return kind(layer, LoraWeights(a, b, scales, place.rows), self.state)

    def _behind(self, name: str, layer: LinearLayer) -> torch.Tensor:
        """A of all slots, [slots, S · R, in], behind the weight of a layer, where all rows become 0."""
        if not isinstance(layer, Linear) or layer.stacked is None:
            raise TypeError(f"{name} has no rows behind its weight")
        rows = layer.stacked[len(layer.weight) :].zero_()
        ranks = len(self.layout.places[name].parts) * self.layout.max_rank
        return rows[: self.max_loras * ranks].view(self.max_loras, ranks, -1)


def lora_bytes(table: WeightTable, shape: LoraShape, stacked: Mapping[str, int] | None = None) -> int:
    """What the slots of `LoraMemory` take, the rows behind weights among it."""
    layout = LoraLayout(table, shape.max_rank, stacked)
    behind = sum(rows * layout.places[name].inputs for name, rows in layout.stacked.items())
    return shape.max_loras * (layout.held * shape.dtype.itemsize + layout.scales * 4) + behind * shape.dtype.itemsize
