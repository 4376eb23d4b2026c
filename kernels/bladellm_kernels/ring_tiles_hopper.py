"""The ring of `ring_units_hopper` in shared memory, and the copies that fill it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

TILE_ROWS = gl.constexpr(64)
UNITS = gl.constexpr(32)


class Ring(NamedTuple):
    """Of every stage the units and the inputs of a tile, and a barrier that says that they are here."""

    units: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    barriers: gl.shared_memory_descriptor


class Source(NamedTuple):
    """What tiles are copied from: x from a token on, and the codes, [tiles, steps · 64, 32]; tiles along K."""

    x: tma.tensor_descriptor
    token: gl.tensor
    codes: tma.tensor_descriptor
    length: gl.tensor


class Cursor(NamedTuple):
    """The tile that is copied next: its block of outputs, its place along K, and how many are left."""

    block: gl.tensor
    place: gl.tensor
    left: gl.tensor


@gluon.jit  # type: ignore[untyped-decorator]
def new_ring(dtype: gl.constexpr, TILE: gl.constexpr) -> Ring:
    STAGES: gl.constexpr = TILE.stages
    TILES: gl.constexpr = TILE.outputs // TILE_ROWS
    LENGTH: gl.constexpr = TILE.steps * TILE_ROWS
    INPUTS: gl.constexpr = TILE.inputs
    ROWS: gl.constexpr = TILE.rows
    PARTS: gl.constexpr = TILE.parts
    UNITS_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PARTS, TILES, LENGTH, UNITS], gl.int16)
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, INPUTS], dtype)
    units = gl.allocate_shared_memory(gl.int16, [STAGES, PARTS, TILES, LENGTH, UNITS], UNITS_SHARED)
    numbers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], X_SHARED)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    # The copy engine sees the barriers.
    fence_async_shared()
    gl.thread_barrier()
    return Ring(units, numbers, barriers)


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_units(source: gl.tuple, ring: gl.tuple, stage: gl.tensor, cursor: gl.tuple, TILE: gl.constexpr) -> Cursor:
    """Start to copy the units of a tile, where one is left, and return the next; its barrier expects inputs too."""
    BYTES: gl.constexpr = 2 * TILE.inputs * TILE.rows + 2 * TILE.parts * TILE.outputs * TILE.steps * UNITS
    inside = cursor.left > 0
    place = [0, cursor.block * (TILE.outputs // TILE_ROWS), cursor.place * (TILE.steps * TILE_ROWS), 0]
    barrier = ring.barriers.index(stage)
    mbarrier.expect(barrier, BYTES, pred=inside)
    tma.async_copy_global_to_shared(source.codes, place, barrier, ring.units.index(stage), pred=inside)
    following: Cursor = _next(cursor, source.length)
    return following


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_x(source: gl.tuple, ring: gl.tuple, stage: gl.tensor, cursor: gl.tuple, TILE: gl.constexpr) -> Cursor:
    """Start to copy the inputs of a tile, where one is left, and return the next."""
    place = [source.token, cursor.place * TILE.inputs]
    buffer = ring.numbers.index(stage)
    tma.async_copy_global_to_shared(source.x, place, ring.barriers.index(stage), buffer, pred=cursor.left > 0)
    following: Cursor = _next(cursor, source.length)
    return following


@gluon.jit  # type: ignore[untyped-decorator]
def _next(cursor: gl.tuple, length: gl.tensor) -> Cursor:
    ends = cursor.place == length - 1
    return Cursor(gl.where(ends, cursor.block + 1, cursor.block), gl.where(ends, 0, cursor.place + 1), cursor.left - 1)
