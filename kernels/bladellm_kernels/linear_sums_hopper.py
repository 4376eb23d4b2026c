"""What becomes of the sums of `linear_hopper`: those of programs that share a block meet."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Tile(NamedTuple):
    """What the kernel is compiled for. rows: of x; outputs, inputs: of the weight; stages: tiles in the ring.

    parts: 2 where the weight is a gate-up projection, of which a stage has a tile each. late: with how many tiles to go
    the next kernel may start, 0 for at once. prefetch: columns of the weight behind the ring's that are asked into the
    L2 cache before the inputs are ready. squares: of a norm in front, most partial sums a row has, a power of two.
    unrolled: partial sums that are asked for at once, 128 registers of each of 128 threads.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    warps: int
    parts: int
    late: int = 0
    prefetch: int = 0
    squares: int = 0
    unrolled: int = 16384


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def sums_layout(tile: Tile) -> gl.NVMMADistributedLayout:
    """Of the product, [outputs, rows]."""
    return gl.NVMMADistributedLayout([3, 0], [tile.warps, 1], [16, tile.rows, 16])


@gluon.jit  # type: ignore[untyped-decorator]
def zeros(TILE: gl.constexpr) -> gl.tuple:
    """The sums of nothing, float32 [outputs, rows] of each part."""
    OUTPUTS: gl.constexpr = TILE.outputs
    ROWS: gl.constexpr = TILE.rows
    PARTS: gl.constexpr = TILE.parts
    sums: gl.tuple = ()
    for _part in gl.static_range(PARTS):
        sums += (gl.zeros((OUTPUTS, ROWS), gl.float32, sums_layout(TILE)),)
    return sums


@gluon.jit  # type: ignore[untyped-decorator]
def _slot(lowest: gl.tensor, segment: gl.tensor) -> gl.tensor:
    """Where the sums of a block's segment are left: at most one of a program's is a block's first, and one is not."""
    return (lowest + segment) * 2 + gl.minimum(segment, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def join_segments(
    sums: gl.tuple,
    partial: gl.tensor,
    counter: gl.tensor,
    lowest: gl.tensor,
    segments: gl.tensor,
    SEGMENTS: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """The sums over the whole of K, and whether this program has them: the last one to come takes the counter back."""
    PARTS: gl.constexpr = TILE.parts
    SIZE: gl.constexpr = TILE.outputs * TILE.rows
    last = segments == 1
    if segments > 1:
        place = partial + _numbers(TILE)
        slot = _slot(lowest, gl.program_id(0) - lowest)
        for part in gl.static_range(PARTS):
            gl.store(place + (slot * PARTS + part) * SIZE, sums[part])
        # All threads' sums are written before the one that counts says so.
        gl.thread_barrier()
        last = gl.atomic_add(counter, 1, sem="acq_rel") == segments - 1
        if last:
            gl.store(counter, 0)
            sums = _added_segments(place, lowest, segments, SEGMENTS, TILE)
    return sums, last


@gluon.jit  # type: ignore[untyped-decorator]
def _numbers(TILE: gl.constexpr) -> gl.tensor:
    """Of the sums of a tile, int32 [outputs, rows]."""
    LAYOUT: gl.constexpr = sums_layout(TILE)
    output = gl.arange(0, TILE.outputs, layout=gl.SliceLayout(1, LAYOUT))
    row = gl.arange(0, TILE.rows, layout=gl.SliceLayout(0, LAYOUT))
    return output[:, None] * TILE.rows + row[None, :]


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def together(segments: int, size: int, unrolled: int) -> int:
    """Of how many segments of `size` sums all are asked for before the first one is added."""
    return max(1, min(segments, unrolled // size))


@gluon.jit  # type: ignore[untyped-decorator]
def _added_segments(
    place: gl.tensor,
    lowest: gl.tensor,
    segments: gl.tensor,
    SEGMENTS: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Sums of all segments, in their order; read past the L1 cache, which does not see what others write."""
    PARTS: gl.constexpr = TILE.parts
    SIZE: gl.constexpr = TILE.outputs * TILE.rows
    TOGETHER: gl.constexpr = together(SEGMENTS, SIZE * PARTS, TILE.unrolled)
    added = zeros(TILE)
    for first in range(0, segments, TOGETHER):
        for index in gl.static_range(TOGETHER):
            segment = first + index
            inside = gl.full((TILE.outputs, TILE.rows), 0, gl.int32, sums_layout(TILE)) + segment < segments
            added = _add_segment(added, place + _slot(lowest, segment) * PARTS * SIZE, inside, TILE)
    return added


@gluon.jit  # type: ignore[untyped-decorator]
def _add_segment(sums: gl.tuple, place: gl.tensor, inside: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    PARTS: gl.constexpr = TILE.parts
    SIZE: gl.constexpr = TILE.outputs * TILE.rows
    added: gl.tuple = ()
    for part in gl.static_range(PARTS):
        added += (sums[part] + gl.load(place + part * SIZE, mask=inside, other=0.0, cache_modifier=".cg"),)
    return added
