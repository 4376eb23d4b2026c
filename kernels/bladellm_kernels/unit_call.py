"""One product by a `UnitWeight` with what goes along with it, as its kernels are launched."""

from dataclasses import dataclass

import torch

from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear_launch import NextNorm
from bladellm_kernels.power_of_two import power_of_two
from bladellm_kernels.weight_units import UnitWeight
from bladellm_kernels.weight_units_triton import UnitShape, WeightArguments


@dataclass(frozen=True, slots=True)
class UnitCall:
    """x [T, K], any strides; weight of parts · N outputs; out [T, N], rows contiguous; bias [parts · N], residual
    [T, N], rows contiguous, may be out; the last two may be None.

    parts: 2 where out is `silu(first N) · second N`, else 1. front: the norm that x is the weighted part of; behind:
    that of the outputs, its squares in as many parts as `unit_launch.norm_parts` says.
    """

    x: torch.Tensor
    weight: UnitWeight
    out: torch.Tensor
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    parts: int = 1
    front: DelayedNorm | None = None
    behind: NextNorm | None = None

    @property
    def tokens(self) -> int:
        return len(self.x)

    @property
    def outputs(self) -> int:
        return self.out.shape[1]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of x's rows and columns, and the rows of residual and out."""
        residual = 0 if self.residual is None else self.residual.stride(0)
        return self.x.stride(0), self.x.stride(1), residual, self.out.stride(0)

    @property
    def alone(self) -> bool:
        """Whether no residual or norm is read or written beside the outputs: tokens may be divided among programs."""
        return self.residual is None and self.front is None and self.behind is None

    @property
    def squares(self) -> int:
        """At least as many as the partial sums that a row of the norm in front has, a power of two."""
        return power_of_two(self.front.squares.shape[1]) if self.front else 0

    @property
    def pairs(self) -> WeightArguments:
        """The weight as kernels take it that read two units at a time."""
        return self.arguments._replace(codes=self.weight.codes.view(torch.int32))

    @property
    def arguments(self) -> WeightArguments:
        return unit_arguments(self.weight)

    def shape(self, warps: int) -> UnitShape:
        """Of a kernel whose rounds are so many steps."""
        return unit_shape(self.weight, warps, self.x)


def unit_arguments(weight: UnitWeight) -> WeightArguments:
    # What is not there is not read.
    zeros = weight.codes if weight.zeros is None else weight.zeros
    tiles, steps = weight.codes.shape[:2]
    return WeightArguments(weight.codes, weight.scales, zeros, tiles, steps, weight.scales.shape[1])


def unit_shape(weight: UnitWeight, warps: int, x: torch.Tensor) -> UnitShape:
    even = weight.columns % weight.step == 0 and weight.steps % warps == 0
    return UnitShape(weight.bits, weight.group_steps, weight.zeros is not None, even, plain=not x.is_cuda)
