"""Linear layers: of a plain weight, and of several pieces that give the outputs of one fused layer."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from bladellm_kernels.linear import linear
from bladellm_kernels.linear_schedules import MAX_ROWS


class LinearLayer(Protocol):
    """What a decoder needs of a linear layer, however its weight is stored.

    `bytes`: of everything it holds on its device.
    """

    bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out] of the same type."""


class Linear:
    """`x · weightᵀ + bias`: x [T, in], weight [out, in], bias [out] or None, all of one type. Returns [T, out], or
    writes to `out`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.bytes = sum(part.nbytes for part in (weight, bias) if part is not None)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        plain = x.is_cpu and out is None
        return F.linear(x, self.weight, self.bias) if plain else linear(x, self.weight, self.bias, out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> bool:
        """Add the outputs to residual [T, out], in place, where that saves a kernel: cuBLAS computes them, and takes no
        bias beside it. Whether it did."""
        if self.bias is not None or not by_cublas(x):
            return False
        linear(x, self.weight, out=residual, residual=residual)
        return True


def by_cublas(x: torch.Tensor) -> bool:
    """Whether a linear layer of x [T, in] is left to cuBLAS for its number of rows."""
    return x.is_cuda and len(x) > MAX_ROWS


def added(layer: LinearLayer, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor | None:
    """The outputs of x [T, in], or None where they were added to residual [T, out], if there is one."""
    if residual is not None and isinstance(layer, Linear) and layer.add_to(residual, x):
        return None
    return layer(x)


class StackedLinear:
    """Pieces that read the same x [T, in]; their outputs side by side, [T, out of all].

    For fused layers whose parts cannot be one weight: of different schemes, orders of inputs or input scales.
    """

    def __init__(self, pieces: Sequence[LinearLayer]) -> None:
        self.pieces = tuple(pieces)
        self.bytes = sum(piece.bytes for piece in pieces)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece(x) for piece in self.pieces], dim=1)
