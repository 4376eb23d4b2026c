"""The part of a kernel that asks for the weight of the next one: see `ahead`."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.ahead import MOST_ROWS, ahead_pieces
from bladellm_kernels.early_launch import early_launch


class Ahead(NamedTuple):
    """bytes: uint8 [rows and more, any], stride bytes from row to row; constants: pieces of a row, bytes of a piece.

    bytes is None where nothing is asked for.
    """

    bytes: Any
    stride: Any
    rows: Any


@triton.jit  # type: ignore[untyped-decorator]
def ask_ahead(
    ahead: tl.tuple, program: tl.tensor, programs: tl.tensor, PIECES: tl.constexpr, PIECE: tl.constexpr,
    LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Ask for this program's share of the pieces. LANES: the program's threads."""
    if ahead.bytes is not None:
        number = ahead.rows * PIECES
        for first in range(program * LANES, number, programs * LANES):
            piece = tl.minimum(first + tl.arange(0, LANES), number - 1)
            place = (piece // PIECES).to(tl.int64) * ahead.stride + piece % PIECES * PIECE
            tl.inline_asm_elementwise(
                "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
                [(ahead.bytes + place).to(tl.int64), tl.full((LANES,), PIECE, tl.int32)],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


def ahead_arguments(weight: torch.Tensor | None, rows: int, device: torch.device) -> tuple[Ahead, int, int]:
    """What `ask_ahead` takes, and pieces of a row and bytes of a piece; for a step of `rows` rows of x.

    weight: as `weight_bytes` returns it.
    """
    if weight is not None and 0 < rows <= MOST_ROWS and early_launch(device)["EARLY"]:
        found = ahead_pieces(*weight.shape)
        if found is not None:
            return Ahead(weight, weight.stride(0), found.rows), found.pieces, found.piece
    return Ahead(None, 0, 0), 0, 0
