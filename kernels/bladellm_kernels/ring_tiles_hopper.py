"""The ring of `ring_units_hopper` in shared memory, and the copies that fill it."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from bladellm_kernels.early_launch import wait_for_inputs

TILE_ROWS = gl.constexpr(64)
UNITS = gl.constexpr(32)


class Ring(NamedTuple):
    """Of every stage the units of each group of warps and the inputs of a tile, a barrier that says that they are here
    (`full`), and one that says that they have been read (`empty`)."""

    units: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


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
    WIDE: gl.constexpr = TILE.wide
    LENGTH: gl.constexpr = TILE.steps * TILE_ROWS
    INPUTS: gl.constexpr = TILE.inputs
    ROWS: gl.constexpr = TILE.rows
    PARTS: gl.constexpr = TILE.parts
    UNITS_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([PARTS, TILES, LENGTH, UNITS], gl.int16)
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, INPUTS], dtype)
    units = gl.allocate_shared_memory(gl.int16, [STAGES * WIDE, PARTS, TILES, LENGTH, UNITS], UNITS_SHARED)
    numbers = gl.allocate_shared_memory(dtype, [STAGES, ROWS, INPUTS], X_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=TILE.wide)
    return Ring(units, numbers, full, empty)


@gluon.jit  # type: ignore[untyped-decorator]
def new_meetings(TILE: gl.constexpr) -> gl.tuple:
    """Where groups that take tiles by turns leave their sums for the first of them, float32 [outputs of all parts,
    rows] each, and barriers that say that they all have, and that it has read them; nothing where none take turns."""
    found: gl.tuple = ()
    OTHERS: gl.constexpr = TILE.deep - 1
    if OTHERS > 0:
        OUTPUTS: gl.constexpr = TILE.parts * TILE.outputs
        ROWS: gl.constexpr = TILE.rows
        WIDE: gl.constexpr = TILE.wide
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        sums = gl.allocate_shared_memory(gl.float32, [WIDE * OTHERS, OUTPUTS, ROWS], SHARED)
        full = gl.allocate_shared_memory(gl.int64, [WIDE, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [WIDE, 1], mbarrier.MBarrierLayout())
        for each in gl.static_range(WIDE):
            mbarrier.init(full.index(each), count=OTHERS)
            mbarrier.init(empty.index(each), count=1)
        found += (sums, full, empty)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_units(source: gl.tuple, ring: gl.tuple, stage: gl.tensor, cursor: gl.tuple, TILE: gl.constexpr) -> Cursor:
    """Start to copy the units of a tile, where one is left, and return the next; its barrier expects inputs too."""
    WIDE: gl.constexpr = TILE.wide
    BYTES: gl.constexpr = 2 * TILE.inputs * TILE.rows + 2 * TILE.parts * WIDE * TILE.outputs * TILE.steps * UNITS
    inside = cursor.left > 0
    barrier = ring.full.index(stage)
    mbarrier.expect(barrier, BYTES, pred=inside)
    for group in gl.static_range(WIDE):
        tile = (cursor.block * WIDE + group) * (TILE.outputs // TILE_ROWS)
        place = [0, tile, cursor.place * (TILE.steps * TILE_ROWS), 0]
        buffer = ring.units.index(stage * WIDE + group)
        tma.async_copy_global_to_shared(source.codes, place, barrier, buffer, pred=inside)
    following: Cursor = _next(cursor, source.length)
    return following


@gluon.jit  # type: ignore[untyped-decorator]
def fetch_x(source: gl.tuple, ring: gl.tuple, stage: gl.tensor, cursor: gl.tuple, TILE: gl.constexpr) -> Cursor:
    """Start to copy the inputs of a tile, where one is left, and return the next."""
    place = [source.token, cursor.place * TILE.inputs]
    buffer = ring.numbers.index(stage)
    tma.async_copy_global_to_shared(source.x, place, ring.full.index(stage), buffer, pred=cursor.left > 0)
    following: Cursor = _next(cursor, source.length)
    return following


@gluon.jit  # type: ignore[untyped-decorator]
def fill_ring(source: gl.tuple, ring: gl.tuple, first: gl.tuple, TILE: gl.constexpr, EARLY: gl.constexpr) -> None:
    """Fetch the tiles from the first one on, each as soon as there is room; inputs once they are there."""
    STAGES: gl.constexpr = TILE.stages
    AHEAD: gl.constexpr = TILE.ahead
    units = first
    for stage in gl.static_range(AHEAD):
        units = fetch_units(source, ring, stage, units, TILE)
    wait_for_inputs(EARLY)
    numbers = first
    for stage in gl.static_range(STAGES):
        if stage >= AHEAD:
            units = fetch_units(source, ring, stage, units, TILE)
        numbers = fetch_x(source, ring, stage, numbers, TILE)
    stage = 0
    turn = 0
    while units.left > 0:
        mbarrier.wait(ring.empty.index(stage), turn)
        units = fetch_units(source, ring, stage, units, TILE)
        numbers = fetch_x(source, ring, stage, numbers, TILE)
        turn ^= stage == STAGES - 1
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)


@gluon.jit  # type: ignore[untyped-decorator]
def _next(cursor: gl.tuple, length: gl.tensor) -> Cursor:
    ends = cursor.place == length - 1
    return Cursor(gl.where(ends, cursor.block + 1, cursor.block), gl.where(ends, 0, cursor.place + 1), cursor.left - 1)
