"""The factor of the inverse Hessian that GPTQ spreads errors with (Frantar et al., arXiv:2210.17323, section 3.3)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

DAMP_GROWTH = 4.0
DAMP_FLOOR = 1e-4
DAMP_LIMIT = 10.0
"""A Hessian still not positive definite with this many times its mean diagonal added is no Hessian."""

_INVERT_WHOLE = 512


@dataclass(frozen=True, slots=True)
class Factor:
    """upper: float32 [K, K], U of (H + damp · mean(diag H) · I)⁻¹ = Uᵀ·U up to a positive number, with the columns of H
    in the order asked for. damp: the share that was added in the end."""

    upper: torch.Tensor
    damp: float


def factorise(gram: torch.Tensor, damp: float, order: torch.Tensor | None = None) -> Factor | None:
    """Factorise the damped inverse of gram, float32 [K, K] symmetric, left as it is; only its lower triangle counts
    once it is ordered.

    order: int64 [K], row and column k of the factor stand for input order[k]. Inputs that are always 0 get the
    diagonal 1. Damping starts at `damp` and grows until the Cholesky succeeds; None where it never does (numbers that
    are not finite), and where all of gram is 0.
    """
    diagonal = gram.diagonal()
    live = diagonal[diagonal > 0]
    if not len(live) or not bool(diagonal.isfinite().all()):
        return None
    mean = float(live.double().mean())
    reversed_order = _reversed_order(len(gram), order, gram.device)
    hessian = gram.index_select(0, reversed_order).index_select(1, reversed_order).div_(mean)
    diagonal = hessian.diagonal()
    diagonal.masked_fill_(diagonal <= 0, 1)
    added = 0.0
    for share in _damping(damp):
        diagonal.add_(share - added)
        added = share
        upper = _upper_factor(hessian)
        if upper is not None:
            return Factor(upper, share)
    return None


def _upper_factor(reversed_hessian: torch.Tensor) -> torch.Tensor | None:
    """U of H⁻¹ = Uᵀ·U from H with rows and columns in reverse.

    With J the reversal and J·H·J = L·Lᵀ, H = (J·L·J)·(J·L·J)ᵀ where J·L·J is upper triangular; so U = J·L⁻¹·J: one
    Cholesky and one triangular inverse instead of Cholesky, inverse and Cholesky.
    """
    lower, info = torch.linalg.cholesky_ex(reversed_hessian)
    if int(info) != 0:
        return None
    _invert_lower(lower)
    # The sum is finite only where every number is, and costs no mask of the matrix's size.
    return lower.flip(0, 1) if bool(lower.sum().isfinite()) else None


def _invert_lower(matrix: torch.Tensor) -> None:
    """Invert a lower triangular matrix in place, by halves: [[A, 0], [B, C]]⁻¹ = [[A⁻¹, 0], [−C⁻¹·B·A⁻¹, C⁻¹]]."""
    size = len(matrix)
    if size <= _INVERT_WHOLE:
        identity = torch.eye(size, dtype=matrix.dtype, device=matrix.device)
        matrix.copy_(torch.linalg.solve_triangular(matrix, identity, upper=False))
        return
    half = size // 2
    first, corner, second = matrix[:half, :half], matrix[half:, :half], matrix[half:, half:]
    _invert_lower(first)
    _invert_lower(second)
    corner.copy_((second @ corner).neg_() @ first)


def _reversed_order(columns: int, order: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    return (torch.arange(columns, device=device) if order is None else order).flip(0)


def _damping(damp: float) -> Iterator[float]:
    while damp <= DAMP_LIMIT:
        yield damp
        damp = max(damp * DAMP_GROWTH, DAMP_FLOOR)
