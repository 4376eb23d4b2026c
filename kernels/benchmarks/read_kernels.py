"""Triton kernels that do nothing but read memory, or nothing at all: what other kernels are compared with."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class ReadSchedule:
    """How a persistent read is launched.

    tile_words: int32 words that a program has in hand at a time, a power of two. stages: at 1 plain loads; more of them
    copy that many tiles ahead through shared memory.
    """

    programs_per_sm: int
    tile_words: int
    warps: int = 4
    stages: int = 1

    def __str__(self) -> str:
        tile = f"{self.tile_words * 4 // 1024} KiB"
        return f"{self.programs_per_sm} programs/SM, {tile}, {self.warps} warps, {self.stages} stages"


@triton.jit(do_not_specialize=["units", "pieces"])  # type: ignore[untyped-decorator]
def read_kernel(
    words: tl.tensor,
    sums: tl.tensor,
    units: tl.tensor,
    pieces: tl.tensor,
    stride: tl.tensor,
    PIECE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Unit u is piece u % pieces, PIECE words wide, of the TILE rows from u // pieces * TILE; stride in words."""
    first = tl.program_id(0)
    total = tl.zeros((TILE, PIECE), tl.int32)
    for unit in tl.range(first, units, tl.num_programs(0), num_stages=STAGES):
        row = (unit // pieces).to(tl.int64) * TILE + tl.arange(0, TILE)
        column = (unit % pieces) * PIECE + tl.arange(0, PIECE)
        total += tl.load(words + row[:, None] * stride + column[None, :])
    tl.store(sums + first, tl.sum(tl.sum(total.to(tl.int64), axis=1), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def tiny_kernel(counter: tl.tensor) -> None:
    """Adds one to one number: a launch and nothing else."""
    tl.store(counter, tl.load(counter) + 1)


def read_rows(rows: torch.Tensor, sums: torch.Tensor, schedule: ReadSchedule, piece_words: int) -> None:
    """Read all of int32 rows [R, W], whose rows may lie apart, and leave partial sums, modulo 2^32, in sums.

    Consecutive programs read consecutive pieces of `piece_words` of the same rows; sums [programs] is int64 and its
    length is the number of programs launched. ValueError unless rows are whole tiles of whole pieces.
    """
    count, width = rows.shape
    tile = max(1, schedule.tile_words // piece_words)
    if rows.dtype != torch.int32 or sums.dtype != torch.int64 or rows.stride(1) != 1:
        raise ValueError("rows hold int32 words, side by side in a row, and sums int64")
    if width % piece_words or count % tile:
        raise ValueError(
            f"rows {list(rows.shape)} are not whole tiles of {tile} rows and pieces of {piece_words} words"
        )
    read_kernel[(len(sums),)](
        rows, sums, count // tile * (width // piece_words), width // piece_words, rows.stride(0),
        PIECE=piece_words, TILE=tile, STAGES=schedule.stages, num_warps=schedule.warps,
    )  # fmt: skip


def read_flat(words: torch.Tensor, sums: torch.Tensor, schedule: ReadSchedule) -> None:
    """Read all of contiguous int32 words [W], consecutive programs consecutive tiles, as `read_rows` does."""
    if words.dim() != 1 or len(words) % schedule.tile_words:
        raise ValueError(f"words {list(words.shape)} are not whole tiles of {schedule.tile_words}")
    read_rows(words.view(-1, schedule.tile_words), sums, schedule, schedule.tile_words)


def tick(counter: torch.Tensor) -> None:
    """Launch the smallest kernel. counter: one number."""
    tiny_kernel[(1,)](counter, num_warps=1)
