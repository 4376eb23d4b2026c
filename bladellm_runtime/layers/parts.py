"""Rows of a step in parts, so that the sums over ranks of one part pass while another part is computed."""

from dataclasses import dataclass

import torch
from bladellm_kernels.pending_sums import PendingSum

from bladellm_runtime.layers.norm import RmsNorm

PARTS = 2
"""Two are enough: one part's product takes as long as the other part's sum, and more parts fill fewer tiles."""
TILE_ROWS = 128
"""Of a matrix product: a part begins where a tile does."""


@dataclass(frozen=True, slots=True)
class NormedPart:
    """What is to be added to some rows of a residual stream, under way, and the norm behind it."""

    rows: slice
    sum: PendingSum
    norm: RmsNorm

    def finish(self, stream: torch.Tensor, normed: torch.Tensor) -> None:
        """Add it to its rows of the stream [T, hidden], in place, and write their norms to those of `normed`."""
        self.sum.add_norm(stream[self.rows], self.norm.weight, self.norm.eps, normed[self.rows])


def row_parts(rows: int) -> list[slice]:
    """PARTS parts of so many rows, whole tiles but for the last; fewer where there are fewer rows."""
    size = max(1, rows // PARTS)
    size -= size % TILE_ROWS if size >= TILE_ROWS else 0
    starts = [part * size for part in range(min(PARTS, rows))]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], rows], strict=True)]
