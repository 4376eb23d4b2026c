"""What each program of `many_rows_hopper` has to do, and how the pieces of divided tiles meet.

Tiles are taken in bands of rows, whose x stays in the L2 cache while the weight passes. Where they do not come in whole
waves they can be divided among the programs along the inputs, so that all have as much to do (stream-K: Osama et al.
2023, arXiv:2301.03598). Two programs may then have a piece of a tile each; the one that comes last adds up both.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROWS = gl.constexpr(64)
"""Of a tile that a group multiplies."""


class ManyRowsTile(NamedTuple):
    """What the kernel is compiled for. groups: of four consumer warps, one or two; columns: of the product, of both
    halves where parts is 2; inputs: of a stage; stages: in the ring; band: tiles of rows that are taken together;
    divided: among the programs, of which there are then no more than tiles."""

    groups: int
    columns: int
    inputs: int
    stages: int
    parts: int
    band: int
    divided: bool = False


class Meeting(NamedTuple):
    """Where the pieces of tiles meet. partial: float32 [programs, 2, groups, ROWS, columns]; counters: int32 [programs,
    groups], how many pieces are there, 0 between calls. Both by the program that has the tile's last inputs."""

    partial: gl.tensor
    counters: gl.tensor


class Pieces(NamedTuple):
    """What a program has to do: `count` pieces of tiles. begin, end: of its stages, counted through all tiles, where
    these are divided; length: stages of a whole tile."""

    count: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    length: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def sums_layout(tile: ManyRowsTile) -> gl.NVMMADistributedLayout:
    """Of a group's product, [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.columns, 16])


@gluon.jit  # type: ignore[untyped-decorator]
def tiles(sizes: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """How many tiles lie below each other, and side by side."""
    rows, outputs, _ = sizes
    return gl.cdiv(rows, TILE.groups * ROWS), gl.cdiv(outputs, TILE.columns // TILE.parts)


@gluon.jit  # type: ignore[untyped-decorator]
def corner(tile: gl.tensor, sizes: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """First row and first output of a tile: down a band, then to the right, then the next band."""
    tall, wide = tiles(sizes, TILE)
    band = tile // (TILE.band * wide)
    height = gl.minimum(tall - band * TILE.band, TILE.band)
    inside = tile - band * TILE.band * wide
    row, output = band * TILE.band + inside % height, inside // height
    return row * (TILE.groups * ROWS), output * (TILE.columns // TILE.parts)


@gluon.jit  # type: ignore[untyped-decorator]
def pieces(sizes: gl.tuple, TILE: gl.constexpr) -> Pieces:
    """A program's: whole tiles, or as many stages as others have."""
    tall, wide = tiles(sizes, TILE)
    program, programs = gl.program_id(0), gl.num_programs(0)
    length = gl.cdiv(sizes[2], TILE.inputs)
    begin, end = program, program
    count = gl.maximum(gl.cdiv(tall * wide - program, programs), 0)
    if TILE.divided:
        begin = program * (tall * wide * length) // programs
        end = (program + 1) * (tall * wide * length) // programs
        count = gl.cdiv(end, length) - begin // length
    return Pieces(count, begin, end, length)


@gluon.jit  # type: ignore[untyped-decorator]
def piece(index: gl.tensor, work: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """A tile, and the first stage and the end of what the program has of it. Of divided tiles the last comes first: its
    beginning is there for the next program long before that one has its end."""
    tile = work.begin + index * gl.num_programs(0)
    first, stop = index * 0, work.length
    if TILE.divided:
        tile = gl.cdiv(work.end, work.length) - 1 - index
        first = gl.maximum(work.begin - tile * work.length, 0)
        stop = gl.minimum(work.end - tile * work.length, work.length)
    return tile, first, stop


@gluon.jit  # type: ignore[untyped-decorator]
def join_pieces(
    sums: gl.tensor,
    meeting: gl.tuple,
    group: gl.constexpr,
    first: gl.tensor,
    stop: gl.tensor,
    length: gl.tensor,
    TILE: gl.constexpr,
) -> gl.tuple:
    """The sums of a whole tile from those of a piece, [first, stop) of its stages, and whether this program has them:
    of two pieces the last one to come. The other's are read past the L1 cache, which does not see what others write."""
    whole = (first == 0) & (stop == length)
    if not whole:
        # Of a tile's beginning the next program has the rest.
        last = gl.program_id(0) + gl.where(first == 0, 1, 0)
        counter = meeting.counters + last * TILE.groups + group
        theirs = gl.where(first == 0, 1, 0)
        place = meeting.partial + _numbers(TILE)
        SIZE: gl.constexpr = ROWS * TILE.columns
        slot = (last * 2 * TILE.groups + group) * SIZE
        whole = gl.atomic_add(counter, 0, sem="acquire") == 1
        if not whole:
            gl.store(place + (slot + (1 - theirs) * TILE.groups * SIZE), sums)
            # All threads' sums are written before the one that counts says so.
            gl.thread_barrier()
            whole = gl.atomic_add(counter, 1, sem="acq_rel") == 1
        if whole:
            gl.thread_barrier()
            gl.store(counter, 0)
            sums += gl.load(place + (slot + theirs * TILE.groups * SIZE), cache_modifier=".cg")
    return sums, whole


@gluon.jit  # type: ignore[untyped-decorator]
def _numbers(TILE: gl.constexpr) -> gl.tensor:
    """Of a group's sums, int32 [ROWS, columns]."""
    LAYOUT: gl.constexpr = sums_layout(TILE)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, TILE.columns, layout=gl.SliceLayout(0, LAYOUT))
    return row[:, None] * TILE.columns + column[None, :]
