"""Linear layers: of a plain weight, and of several pieces that give the outputs of one fused layer."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from bladellm_kernels.linear import linear


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


class StackedLinear:
    """Pieces that read the same x [T, in]; their outputs side by side, [T, out of all].

    For fused layers whose parts cannot be one weight: of different schemes, orders of inputs or input scales.
    """

    def __init__(self, pieces: Sequence[LinearLayer]) -> None:
        self.pieces = tuple(pieces)
        self.bytes = sum(piece.bytes for piece in pieces)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece(x) for piece in self.pieces], dim=1)
