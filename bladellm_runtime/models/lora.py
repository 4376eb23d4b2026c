"""Slots for adapters beside a decoder's weights: where A and B of every layer lie, and the layers that read them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from bladellm_runtime.layers.linear import LinearLayer
from bladellm_runtime.layers.lora import (
    ColParaLinearWithLoRA,
    ColParaLinearWithSliceLoRA,
    LinearWithLoRA,
    LoraState,
    LoraWeights,
    QKVProjectionWithLoRA,
    RowParaLinearWithLoRA,
)
from bladellm_runtime.models.weights import Part, WeightTable

ALIGNMENT = 64
"""Numbers that every matrix begins at a multiple of."""
KINDS: dict[str, type[LinearWithLoRA]] = {
    "qkv": QKVProjectionWithLoRA,
    "output": RowParaLinearWithLoRA,
    "gate_up": ColParaLinearWithSliceLoRA,
    "down": RowParaLinearWithLoRA,
}
"""By the decoder's name of a layer; others are column-parallel layers of one part."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """How many adapters a device holds, the largest rank, and the type that they are held in."""

    max_loras: int
    max_rank: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a fused layer's matrices lie in an adapter: A [S · R, in] from number `a` on, B [out, R] from `b` on, its S
    scales from `scale` on. parts: what the rank holds of the projections, one a slice."""

    parts: tuple[Part, ...]
    a: int
    b: int
    scale: int

    @property
    def inputs(self) -> int:
        return self.parts[0].held[1]

    @property
    def rows(self) -> tuple[int, ...]:
        """Outputs of each slice."""
        return tuple(part.held[0] for part in self.parts)


class LoraLayout:
    """How an adapter lies in memory, the same in a slot and on the host: one array, so that one copy moves it.

    places: by the layer's name without `.weight`. numbers, scales: how many an adapter has of both.
    """

    def __init__(self, table: WeightTable, max_rank: int) -> None:
        """table: what the rank holds, of a whole checkpoint."""
        self.max_rank = max_rank
        self.places: dict[str, LayerPlace] = {}
        self.numbers = self.scales = 0
        for name, parts in table.items():
            if name.startswith("layers.") and parts[0].module is not None:
                self.places[name.removesuffix(".weight")] = self._place(parts)

    def _place(self, parts: Sequence[Part]) -> LayerPlace:
        first = self.numbers
        held = [part.held for part in parts]
        second = first + _aligned(len(parts) * self.max_rank * held[0][1])
        place = LayerPlace(tuple(parts), first, second, self.scales)
        self.numbers = second + _aligned(sum(rows for rows, _ in held) * self.max_rank)
        self.scales += len(parts)
        return place

    @cached_property
    def modules(self) -> dict[str, tuple[LayerPlace, int]]:
        """Every projection by its name in the checkpoint: its layer, and its slice of that."""
        return {
            part.module: (place, number)
            for place in self.places.values()
            for number, part in enumerate(place.parts)
            if part.module is not None
        }

    def views(self, place: LayerPlace, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A [..., S · R, in] and B [..., out, R] of a layer in adapters, [..., numbers]."""
        outer = numbers.shape[:-1]
        ranks, rows = len(place.parts) * self.max_rank, sum(place.rows)
        a = numbers[..., place.a : place.a + ranks * place.inputs]
        b = numbers[..., place.b : place.b + rows * self.max_rank]
        return a.unflatten(-1, (ranks, place.inputs)), b.view(*outer, rows, self.max_rank)


class LoraMemory:
    """`max_loras` slots for adapters on a device, and the state that the layers which read them share.

    numbers: [slots, numbers]; scales: float32 [slots, scales]. A slot that nothing was copied to adds nothing.
    """

    def __init__(self, table: WeightTable, shape: LoraShape, device: torch.device) -> None:
        self.layout = LoraLayout(table, shape.max_rank)
        self.numbers = torch.zeros(shape.max_loras, self.layout.numbers, dtype=shape.dtype, device=device)
        self.scales = torch.zeros(shape.max_loras, self.layout.scales, device=device)
        self.state = LoraState()

    @property
    def max_loras(self) -> int:
        return len(self.numbers)

    @property
    def bytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes

    def wrap(self, linears: dict[str, LinearLayer]) -> dict[str, LinearLayer]:
        """The layers, those of the table with what adapters add."""
        return linears | {name: self._layer(name, linears[name]) for name in self.layout.places}

    def _layer(self, name: str, layer: LinearLayer) -> LinearWithLoRA:
        place = self.layout.places[name]
        a, b = self.layout.views(place, self.numbers)
        scales = self.scales[:, place.scale : place.scale + len(place.parts)]
        kind = KINDS.get(name.rpartition(".")[2], ColParaLinearWithLoRA)
        return kind(layer, LoraWeights(a, b, scales, place.rows), self.state)


def lora_bytes(table: WeightTable, shape: LoraShape) -> int:
    """What the slots of `LoraMemory` take."""
    layout = LoraLayout(table, shape.max_rank)
    return shape.max_loras * (layout.numbers * shape.dtype.itemsize + layout.scales * 4)


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT
