"""From values of parts to the decoder's tensors and linear layers: fused where they can be, packed where quantized."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from bladellm_runtime.layers.linear import Linear, LinearLayer, StackedLinear
from bladellm_runtime.layers.quantized_linear import QuantizedLinear
from bladellm_runtime.models.decoder import Weights
from bladellm_runtime.models.quantized import Schemes
from bladellm_runtime.models.sources import Source
from bladellm_runtime.models.weights import Part, WeightTable, parameter_shape
from bladellm_runtime.quantization.weight import QuantizedWeight, can_stack, stack

Piece = torch.Tensor | QuantizedWeight
"""A weight that runs as one layer."""


class WeightBuilder:
    """Builds parameters of type `dtype` on `device` one after the other: only one at a time is there unpacked."""

    def __init__(
        self,
        source: Source,
        schemes: Schemes,
        device: torch.device,
        dtype: torch.dtype,
        stacked: Mapping[str, int] | None = None,
    ) -> None:
        """stacked: rows to be kept behind the plain weights of some layers, by their names without `.weight`."""
        self._source = source
        self._schemes = schemes
        self._device = device
        self._dtype = dtype
        self._stacked = stacked or {}

    def build(self, table: WeightTable) -> Weights:
        """Every parameter of the table. Raises `CheckpointError` for stored values that no weight can have."""
        weights = Weights({}, {})
        for name, parts in table.items():
            if parts[0].module is not None:
                layer = name.removesuffix(".weight")
                bias = table.get(f"{layer}.bias")
                rows = self._stacked.get(layer)
                weights.linears[layer] = self._linear(parts, bias) if rows is None else self._above(parts, bias, rows)
            elif not name.endswith(".bias"):
                weights.tensors[name] = self._plain(parts)
        self._source.finish()
        return weights

    def _linear(self, parts: Sequence[Part], bias_parts: Sequence[Part] | None) -> LinearLayer:
        bias = None if bias_parts is None else self._plain(bias_parts)
        layers: list[LinearLayer] = []
        first = 0
        for piece in self._pieces(parts):
            last = first + (piece.rows if isinstance(piece, QuantizedWeight) else piece.shape[0])
            own_bias = None if bias is None else bias[first:last]
            if isinstance(piece, QuantizedWeight):
                layers.append(QuantizedLinear(piece, own_bias, self._dtype))
            else:
                layers.append(Linear(piece, own_bias))
            first = last
        return layers[0] if len(layers) == 1 else StackedLinear(layers)

    def _above(self, parts: Sequence[Part], bias_parts: Sequence[Part] | None, rows: int) -> LinearLayer:
        """A layer with so many undefined rows behind its weight, which is plain."""
        bias = None if bias_parts is None else self._plain(bias_parts)
        count, inputs = parameter_shape(parts)
        stacked = torch.empty(count + rows, inputs, dtype=self._dtype, device=self._device)
        self._source.fill(stacked[:count], parts)
        return Linear(stacked[:count], bias, stacked)

    def _pieces(self, parts: Sequence[Part]) -> Iterator[Piece]:
        """The fewest weights, in order, that hold the rows of all parts."""
        for scheme, run in groupby(parts, lambda part: self._schemes.get(part.module or "")):
            if scheme is None:
                yield self._plain(list(run))
            else:
                yield from _stacked([self._source.quantized(part, scheme, self._device) for part in run])

    def _plain(self, parts: Sequence[Part]) -> torch.Tensor:
        parameter = torch.empty(parameter_shape(parts), dtype=self._dtype, device=self._device)
        self._source.fill(parameter, parts)
        return parameter


def _stacked(weights: list[QuantizedWeight]) -> Iterator[QuantizedWeight]:
    """Neighbours stacked as far as they can be."""
    while weights:
        count = 1
        while count < len(weights) and can_stack(weights[: count + 1]):
            count += 1
        yield stack(weights[:count]) if count > 1 else weights[0]
        weights = weights[count:]
