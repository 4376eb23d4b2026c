"""`QuantizedWeight`: the one form every checkpoint format is read into and every quantizer makes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bladellm_runtime.quantization.scheme import Scheme


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """The weight of a linear layer with N outputs and K inputs, G groups of K / G inputs each.

    codes: uint8 [N, K], or float8_e4m3fn [N, K] of an fp8 scheme. scales: floating point [N, G], of the type they are
    stored in. zeros: uint8 [N, G], None where the scheme is symmetric. order: int64 [K], None for the natural one;
    column k of `codes` multiplies input `order[k]` (GPTQ with a scrambled g_idx, its columns sorted by group). A layer
    can have fewer than K inputs: columns that fill up a group are 0 and multiply an input that another one has too. Or
    more: inputs without a column are always 0 (the padding of `cutting.take_inputs`).
    input_scale: the static scale of the input, None where it is dynamic or absent.
    """

    scheme: Scheme
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    input_scale: float | None = None

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def columns(self) -> int:
        return self.codes.shape[1]

    def dequantize(self) -> torch.Tensor:
        """The weight these codes stand for, float32 [N, K], its columns in the order of the inputs."""
        groups = self.scales.shape[1]
        values = self.codes.float().view(self.rows, groups, -1)
        if self.scheme.kind == "int":
            zeros = self.scheme.middle if self.zeros is None else self.zeros.float().unsqueeze(2)
            values = values - zeros
        weight = (values * self.scales.float().unsqueeze(2)).view(self.rows, self.columns)
        if self.order is None:
            return weight
        inputs = int(self.order.max()) + 1
        return weight.new_zeros(self.rows, inputs).index_add_(1, self.order, weight)


def can_stack(parts: Sequence[QuantizedWeight]) -> bool:
    """Whether the parts can be one weight: equal schemes, input scales and orders."""
    first = parts[0]
    return all(
        part.scheme == first.scheme and part.input_scale == first.input_scale and _same(part.order, first.order)
        for part in parts
    )


def stack(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the parts' outputs one below the other. `can_stack` must hold."""
    first = parts[0]
    zeros = None if first.zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
    return QuantizedWeight(
        first.scheme,
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        zeros,
        first.order,
        first.input_scale,
    )


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
