"""What a small kernel asks into the L2 cache of the weight that the next linear layer reads.

Between two linear layers of few rows lie kernels of two or three microseconds in which the memory would be idle. They
ask for the first columns of the next weight, whose tiles all begin there, and wait for nothing: what has arrived when
the linear layer starts need not be read then, and what has not is on its way.
"""

from dataclasses import dataclass

import torch

AHEAD_BYTES = 8 << 20
"""Of a weight, at most: about what the memory of an H200 reads in 2 µs, and little of its L2 cache."""

MOST_ROWS = 512
"""Rows of x from which on linear layers are bound by arithmetic."""

LEAST_PIECE, MOST_PIECE = 256, 512
"""Bytes that are asked for at a time."""


@dataclass(frozen=True, slots=True)
class AheadPieces:
    """Of each of the first `rows` rows of a weight `pieces` times `piece` bytes, from its first on."""

    rows: int
    pieces: int
    piece: int

    @property
    def bytes(self) -> int:
        """Of all of them."""
        return self.rows * self.pieces * self.piece


def ahead_pieces(rows: int, row_bytes: int, most: int = AHEAD_BYTES) -> AheadPieces | None:
    """What is asked for of `rows` rows of row_bytes each, at most `most` bytes; None where rows are too short."""
    if rows == 0 or row_bytes < LEAST_PIECE:
        return None
    share = min(most // rows, row_bytes)
    if share < MOST_PIECE:
        return AheadPieces(min(rows, most // LEAST_PIECE), 1, LEAST_PIECE)
    return AheadPieces(rows, share // MOST_PIECE, MOST_PIECE)


def weight_bytes(weight: torch.Tensor) -> torch.Tensor | None:
    """weight [N, K], its last stride 1, as bytes, uint8 [N, bytes of a row]; None where rows are not at whole 16 bytes,
    which the kernels' way of asking needs."""
    seen = weight.view(torch.uint8)
    return seen if seen.stride(0) % 16 == 0 and seen.data_ptr() % 16 == 0 else None
