"""The Hadamard rotation of heads: spreads outlier channels over all, so that few bits hold them (arXiv:2404.00456).

Rotating queries and keys alike leaves their scores as they are.
"""

import math

import torch

ODD_ORDERS = (12, 20)
"""Orders that Paley's construction adds (with the primes 11 and 19) to the powers of two."""


def hadamard(x: torch.Tensor, matrix: torch.Tensor | None = None, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x @ H / √D, an orthonormal rotation of every head; for D a power of two it is its own inverse.

    x: [..., D] of a float type. matrix: `hadamard_matrix(D)` of any type, on x's device; made here when None. Products
    are summed in float32. Returns x's shape and type, `out` where given. Raises `ValueError` naming a D without one.
    """
    size = x.shape[-1]
    if matrix is None:
        matrix = hadamard_matrix(size, torch.float32, x.device)
    if matrix.shape != (size, size):
        raise ValueError(f"head size {size} needs a Hadamard matrix of that size, got {tuple(matrix.shape)}")
    turned = (x.float() @ matrix.float() / math.sqrt(size)).to(x.dtype)
    return turned if out is None else out.copy_(turned)


def hadamard_matrix(size: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A matrix of ±1 whose rows are orthogonal, [size, size], exact in every float type: H Hᵀ = size · I.

    Size is 2^k (Sylvester's, symmetric), or 12 · 2^k or 20 · 2^k with k >= 1. Each is [[A, A], [A, -A]] of the matrix
    A of half its size. Raises `ValueError` for other sizes.
    """
    odd = next((order for order in ODD_ORDERS if size % (2 * order) == 0 and _is_power_of_two(size // order)), 1)
    if not _is_power_of_two(size // odd) or size < 2 or size % odd:
        raise ValueError(f"no Hadamard rotation for head size {size}: it must be 2^k, 24 · 2^k or 40 · 2^k")
    matrix = torch.ones(1, 1) if odd == 1 else _paley(odd)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.to(device, dtype)


def hadamard_reference(x: torch.Tensor) -> torch.Tensor:
    """`hadamard` for D a power of two as butterflies in float64: pair by pair, (a, b) becomes (a + b, a - b)."""
    rest, size = x.double(), x.shape[-1]
    distance = 1
    while distance < size:
        first, second = rest.unflatten(-1, (-1, 2, distance)).unbind(-2)
        rest = torch.stack((first + second, first - second), -2).flatten(-3)
        distance *= 2
    return rest / math.sqrt(size)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _paley(order: int) -> torch.Tensor:
    """Paley's first construction for a prime p = order - 1 with p % 4 = 3, float32 [order, order]."""
    prime = order - 1
    squares = {i * i % prime for i in range(1, prime)}
    residues = torch.tensor([0] + [1 if i in squares else -1 for i in range(1, prime)])
    distance = (torch.arange(prime)[:, None] - torch.arange(prime)[None]) % prime
    matrix = torch.eye(order)
    matrix[0, 1:], matrix[1:, 0] = 1.0, -1.0
    matrix[1:, 1:] += residues[distance]
    return matrix
