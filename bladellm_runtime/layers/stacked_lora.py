"""A linear layer with A of all slots behind its weight: one product for both, and B with what follows the layer."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear import linear
from bladellm_kernels.lora_stacked import (
    StackedOutputs,
    stacked_expand,
    stacked_expand_add,
    stacked_expand_silu_mul,
)
from bladellm_kernels.lora_tokens import TokenAdapters

MOST_BORROWED = 1 / 16
"""Rows behind a weight, as a share of its own, up to which the schedule that was measured for it alone serves both:
with many more its tiles may take one turn more on the multiprocessors."""


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """The adapters of one layer, a slot each; ranks that an adapter does not have are 0.

    a: [slots, S · R, in], the ranks of slice after slice; b: [slots, out, R]; scales: float32 [slots, S]; rows: outputs
    of each of the S slices.
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor
    rows: tuple[int, ...]


class StackedLora:
    """Of tokens that are not in tiles. weight: [out + slots · S · R or more, in], the layer's rows, then A of slot
    after slot; bias: [out] or None, of the layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, weights: LoraWeights) -> None:
        self.weight = weight
        self.bias = bias
        self.weights = weights
        outputs = sum(weights.rows)
        self._measured = outputs if len(weight) - outputs <= MOST_BORROWED * outputs else None

    def __call__(self, x: torch.Tensor, adapters: TokenAdapters, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out] of the same type, a new tensor or `out`."""
        return stacked_expand(self._outputs(x, adapters), out)

    def silu_mul(self, x: torch.Tensor, adapters: TokenAdapters) -> torch.Tensor:
        """`silu(gate) · up` of two slices, [T, out / 2]."""
        return stacked_expand_silu_mul(self._outputs(x, adapters))

    def normed(self, norm: DelayedNorm, adapters: TokenAdapters) -> torch.Tensor:
        """The layer of a norm, of [T, in] -> [T, out] of its type."""
        return stacked_expand(self._outputs(norm.weighted, adapters, norm))

    def normed_silu_mul(self, norm: DelayedNorm, adapters: TokenAdapters) -> torch.Tensor:
        """`silu(gate) · up` of two slices of the layer of a norm."""
        return stacked_expand_silu_mul(self._outputs(norm.weighted, adapters, norm))

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float, adapters: TokenAdapters
    ) -> tuple[torch.Tensor, DelayedNorm]:
        """Add the layer of x [T, in], of one slice, to the stream [T, out], in place. Returns that and its norm."""
        return residual, stacked_expand_add(self._outputs(x, adapters), residual, norm_weight, eps)

    def _outputs(self, x: torch.Tensor, adapters: TokenAdapters, norm: DelayedNorm | None = None) -> StackedOutputs:
        weights = self.weights
        y = F.linear(x, self.weight) if x.is_cpu else linear(x, self.weight, measured=self._measured)
        return StackedOutputs(y, weights.b, weights.scales, weights.rows, adapters, self.bias, norm)
