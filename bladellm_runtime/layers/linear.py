"""Linear layers: of a plain weight, and of several pieces that give the outputs of one fused layer."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from bladellm_kernels.delayed_norm import DelayedNorm, delayed_norm
from bladellm_kernels.linear import adds_residual, gate_is_part, linear, linear_silu_mul, prepare_linear
from bladellm_kernels.linear_schedules import MAX_ROWS
from bladellm_kernels.normed_linear import (
    linear_add,
    linear_between_norms,
    normed_linear,
    normed_linear_silu_mul,
    norms_schedule,
)
from bladellm_kernels.silu_mul import silu_mul

from bladellm_runtime.layers.norm import RmsNorm
from bladellm_runtime.layers.parts import NormedPart


class LinearLayer(ABC):
    """What a decoder needs of a linear layer, however its weight is stored.

    Besides the layer alone there are compounds with the operators around it, which all layers can compute, and some by
    one kernel each: of many rows with what follows, of few rows with norms. `bytes`: of all it holds on its device;
    `outputs`: of a row.
    """

    bytes: int
    outputs: int

    @property
    def takes_parts(self) -> bool:
        """Whether some of a step's rows can be given without the others."""
        return True

    def prepare(self) -> None:
        """Compile kernels that no step before ready may need."""
        return

    @abstractmethod
    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, in] -> [T, out] of the same type, a new tensor or `out`."""

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """`silu(gate) · up` of the layer of x [T, in] -> [T, out / 2], or in `out`; the gate's outputs first."""
        return silu_mul(self(x), out=out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Add the layer of x [T, in] to residual [T, out], in place, where that saves a kernel. Whether it did."""
        return False

    def add_normed(self, x: torch.Tensor, residual: torch.Tensor, norm: RmsNorm) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the layer of x [T, in] to the residual stream [T, out], in place. Returns (normed, stream)."""
        if self.add_to(residual, x):
            return norm.add(residual, None)
        return norm.add(self(x), residual)

    def start_normed(self, x: torch.Tensor, norm: RmsNorm) -> Sequence[NormedPart] | None:
        """What the layer of x [T, in] adds to the residual stream, in parts that are under way, where that hides what
        ranks wait for; None where `add_normed` serves as well."""
        return None

    def fuses(self, rows: int, gated: bool = False) -> bool:
        """Whether the compounds with norms are kernels for so many rows, `gated`: `normed_silu_mul`, not the others."""
        return False

    @property
    def fills_sms(self) -> bool:
        """Whether these kernels are one program on each multiprocessor. Where two begin on one the layers behind are
        slower too: better not before attention has left all of them."""
        return False

    def shares_sms(self, rows: int) -> bool:
        """Whether a program of these kernels, for so many rows that they fuse, takes less than half of a
        multiprocessor, so that it finds a place beside one of attention's."""
        return True

    def normed(self, norm: DelayedNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        """The layer of a norm, of [T, in] -> [T, out] of its type. `out` may be of float32."""
        y = self(norm.normed())
        return y if out is None else out.copy_(y)

    def normed_silu_mul(self, norm: DelayedNorm) -> torch.Tensor:
        """`silu(gate) · up` of the layer of a norm, of [T, in] -> [T, out / 2]; the gate's outputs first."""
        return silu_mul(self.normed(norm))

    def between_norms(self, x: torch.Tensor) -> torch.Tensor:
        """The layer of x [T, in] -> [T, out] among layers that fuse: by a kernel like theirs, where there is one."""
        return self(x)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        """Add the layer of x [T, in] to the residual stream [T, out], in place. Returns the stream and its norm."""
        residual.add_(self(x))
        return residual, delayed_norm(residual, norm_weight, eps)


class Linear(LinearLayer):
    """`x · weightᵀ + bias`: x [T, in], weight [out, in], bias [out] or None, all of one type.

    stacked: [out and more, in], the weight with rows behind it that others fill; None without. `bytes` without these.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, stacked: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.stacked = stacked
        self.bias = bias
        self.outputs = len(weight)
        self.bytes = sum(part.nbytes for part in (weight, bias) if part is not None)

    def prepare(self) -> None:
        if self.bias is None:
            prepare_linear(self.weight)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        plain = x.is_cpu and out is None
        return F.linear(x, self.weight, self.bias) if plain else linear(x, self.weight, self.bias, out)

    def silu_mul(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.bias is not None or not gate_is_part(x, self.weight):
            return super().silu_mul(x, out)
        return linear_silu_mul(x, self.weight, out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        # Neither cuBLAS nor clusters take a bias beside the residual.
        if self.bias is not None or not (by_cublas(x) or adds_residual(x, self.weight)):
            return False
        linear(x, self.weight, out=residual, residual=residual)
        return True

    def fuses(self, rows: int, gated: bool = False) -> bool:
        # In float16 x · weight can be out of range before the division of the norm.
        ranged = self.weight.dtype != torch.float16
        return ranged and norms_schedule(rows, self.weight, gated and self.bias is None) is not None

    @property
    def fills_sms(self) -> bool:
        return True

    def normed(self, norm: DelayedNorm, out: torch.Tensor | None = None) -> torch.Tensor:
        return normed_linear(norm, self.weight, self.bias, out)

    def normed_silu_mul(self, norm: DelayedNorm) -> torch.Tensor:
        if self.bias is not None:
            return silu_mul(self.normed(norm))
        return normed_linear_silu_mul(norm, self.weight)

    def between_norms(self, x: torch.Tensor) -> torch.Tensor:
        return linear_between_norms(x, self.weight, self.bias)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        return linear_add(x, self.weight, residual, norm_weight, eps, self.bias, out=residual)


class StackedLinear(LinearLayer):
    """Pieces that read the same x [T, in]; their outputs side by side, [T, out of all].

    For fused layers whose parts cannot be one weight: of different schemes, orders of inputs or input scales.
    """

    def __init__(self, pieces: Sequence[LinearLayer]) -> None:
        self.pieces = tuple(pieces)
        self.bytes = sum(piece.bytes for piece in pieces)
        self.outputs = sum(piece.outputs for piece in pieces)

    def prepare(self) -> None:
        for piece in self.pieces:
            piece.prepare()

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([piece(x) for piece in self.pieces], dim=1, out=out)


def by_cublas(x: torch.Tensor) -> bool:
    """Whether a linear layer of x [T, in] is left to cuBLAS for its number of rows."""
    return x.is_cuda and len(x) > MAX_ROWS
