"""Linear layers that keep their weight a second time, in 12 bits a number, for steps of few rows."""

from collections.abc import Sequence

import torch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.packed_linear import MAX_ROWS, packed_linear, prepare_kernels, reads_packed
from bladellm_kernels.packed_weight import PackedWeight

from bladellm_runtime.layers.linear import Linear, LinearLayer


class PackedLinear(Linear):
    """`Linear`, which reads the packed weight where x has few rows; the same numbers, so that results do not differ by
    more than the order of sums.

    packed: with the gate's rows and up's in turn, of a layer whose `silu_mul` is asked for, not the layer alone.
    """

    def __init__(self, weight: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__(weight, bias)
        self.packed = packed
        self.bytes += packed.bytes

    def prepare(self) -> None:
        super().prepare()
        residuals: Sequence[bool] = (False,) if self.packed.gated else (False, True)
        for residual in residuals:
            prepare_kernels(self.packed, range(1, MAX_ROWS + 1), residual)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed.gated or not reads_packed(x, self.packed):
            return super().__call__(x, out)
        return packed_linear(x, self.packed, out, None if self.bias is None else self.bias.expand(len(x), -1))

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if not self.packed.gated or not reads_packed(x, self.packed):
            return super().silu_mul(x, out)
        return packed_linear(x, self.packed, out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        if self.packed.gated or self.bias is not None or not reads_packed(x, self.packed):
            return super().add_to(residual, x)
        packed_linear(x, self.packed, residual, residual)
        return True

    def normed(self, norm: DelayedNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.packed.gated or not reads_packed(norm.weighted, self.packed):
            return super().normed(norm, out)
        return LinearLayer.normed(self, norm, out)

    def fuses(self, rows: int, gated: bool = False) -> bool:
        # Norms of their own cost less than reading a third more.
        return rows > MAX_ROWS and super().fuses(rows, gated)
