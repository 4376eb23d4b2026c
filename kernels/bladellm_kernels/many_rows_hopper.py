"""The kernel of linear layers of many rows on a Hopper, SiLU · mul with them where the weight is a gate-up projection.

Every multiprocessor runs one program, which takes tile after tile: a producer warp brings tiles of x and of the weight
into a ring by the copy engine (TMA), and two groups of four consumer warps multiply 64 rows each by all of a tile's
columns. While they write a tile's results, the ring fills for the next one. Of a gate-up projection a tile has the same
outputs of both halves. Tiles are taken in bands of rows, whose x stays in the L2 cache while the weight passes.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs

ROWS = gl.constexpr(64)
"""Of a tile that a group multiplies."""
STORED = gl.constexpr(64)
"""Columns of results that are written at once: 128 bytes."""


class ManyRowsTile(NamedTuple):
    """What the kernel is compiled for. groups: of four consumer warps, one or two; columns: of the product, of both
    halves where parts is 2; inputs: of a stage; stages: in the ring; band: tiles of rows that are taken together."""

    groups: int
    columns: int
    inputs: int
    stages: int
    parts: int
    band: int


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def sums_layout(tile: ManyRowsTile) -> gl.NVMMADistributedLayout:
    """Of a group's product, [ROWS, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tile.columns, 16])


@gluon.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def many_rows_kernel(
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    out: tma.tensor_descriptor,
    rows: gl.tensor,
    outputs: gl.tensor,
    inputs: gl.tensor,
    TILE: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """x [rows, inputs] in tiles of [ROWS, TILE.inputs]; weight [TILE.parts · outputs, inputs] in tiles of
    [TILE.columns / TILE.parts, TILE.inputs]; out [rows, outputs] in tiles of [ROWS, STORED]."""
    let_next_start(EARLY)
    ring = _new_ring(x.dtype, TILE)
    results = _new_results(x.dtype, TILE)
    sizes = (rows, outputs, inputs)
    if TILE.groups == 1:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, results, out, sizes, TILE, EARLY)),
                (_fetch, (ring, x, weight, sizes, TILE, EARLY)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, ring, results, out, sizes, TILE, EARLY)),
                (_multiply, (1, ring, results, out, sizes, TILE, EARLY)),
                (_fetch, (ring, x, weight, sizes, TILE, EARLY)),
            ],
            [4, 1],
            [232, 24],
        )


@gluon.jit  # type: ignore[untyped-decorator]
def _new_ring(dtype: gl.constexpr, TILE: gl.constexpr) -> gl.tuple:
    """Tiles of x and of the weight, and for every stage barriers that say that it is full, and that it was read."""
    STAGES: gl.constexpr = TILE.stages
    INPUTS: gl.constexpr = TILE.inputs
    COLUMNS: gl.constexpr = TILE.columns
    GROUPS: gl.constexpr = TILE.groups
    X_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, INPUTS], dtype)
    W_SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, INPUTS], dtype)
    numbers = gl.allocate_shared_memory(dtype, [STAGES * GROUPS, ROWS, INPUTS], X_SHARED)
    weights = gl.allocate_shared_memory(dtype, [STAGES, COLUMNS, INPUTS], W_SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    # The copy engine sees the barriers.
    fence_async_shared()
    gl.thread_barrier()
    return numbers, weights, full, empty


@gluon.jit  # type: ignore[untyped-decorator]
def _new_results(dtype: gl.constexpr, TILE: gl.constexpr) -> gl.tensor:
    """Two blocks of results a group: one is filled while the other is written to memory."""
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, STORED], dtype)
    return gl.allocate_shared_memory(dtype, [TILE.groups * 2, ROWS, STORED], SHARED)


@gluon.jit  # type: ignore[untyped-decorator]
def _tiles(sizes: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """How many tiles lie below each other, and side by side."""
    rows, outputs, _ = sizes
    return gl.cdiv(rows, TILE.groups * ROWS), gl.cdiv(outputs, TILE.columns // TILE.parts)


@gluon.jit  # type: ignore[untyped-decorator]
def _place(tile: gl.tensor, sizes: gl.tuple, TILE: gl.constexpr) -> gl.tuple:
    """First row and first output of a tile: down a band, then to the right, then the next band."""
    tall, wide = _tiles(sizes, TILE)
    band = tile // (TILE.band * wide)
    height = gl.minimum(tall - band * TILE.band, TILE.band)
    inside = tile - band * TILE.band * wide
    row, output = band * TILE.band + inside % height, inside // height
    return row * (TILE.groups * ROWS), output * (TILE.columns // TILE.parts)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(
    ring: gl.tuple,
    x: tma.tensor_descriptor,
    weight: tma.tensor_descriptor,
    sizes: gl.tuple,
    TILE: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """The warp that fills the ring, as soon as all groups have read a stage; with what the first stages have of the
    weight before the inputs are ready."""
    tall, wide = _tiles(sizes, TILE)
    length = gl.cdiv(sizes[2], TILE.inputs)
    row, output = _place(gl.program_id(0), sizes, TILE)
    ahead = gl.where(gl.program_id(0) < tall * wide, gl.minimum(length, TILE.stages), 0)
    for step in range(ahead):
        _fetch_weight(ring, weight, step, output, step, sizes, TILE)
    wait_for_inputs(EARLY)
    for step in range(ahead):
        _fetch_x(ring, x, step, row, step, TILE)
    step = ahead
    for tile in range(gl.program_id(0), tall * wide, gl.num_programs(0)):
        row, output = _place(tile, sizes, TILE)
        for each in range(gl.where(tile == gl.program_id(0), ahead, 0), length):
            # The first turn of the ring waits for the phase before the first one, which has ended.
            mbarrier.wait(ring[3].index(step % TILE.stages), (step // TILE.stages + 1) & 1)
            _fetch_weight(ring, weight, step, output, each, sizes, TILE)
            _fetch_x(ring, x, step, row, each, TILE)
            step += 1


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_weight(
    ring: gl.tuple,
    weight: tma.tensor_descriptor,
    step: gl.tensor,
    output: gl.tensor,
    each: gl.tensor,
    sizes: gl.tuple,
    TILE: gl.constexpr,
) -> None:
    """Start to copy what the program's `step`-th stage has of the weight: its tiles from `output` on, the `each`-th
    along the inputs."""
    _, weights, full, _ = ring
    PARTS: gl.constexpr = TILE.parts
    OUTPUTS: gl.constexpr = TILE.columns // TILE.parts
    BYTES: gl.constexpr = 2 * TILE.inputs * (TILE.groups * ROWS + TILE.columns)
    stage = step % TILE.stages
    mbarrier.expect(full.index(stage), BYTES)
    for part in gl.static_range(PARTS):
        buffer = weights.index(stage).slice(part * OUTPUTS, OUTPUTS)
        place = [output + part * sizes[1], each * TILE.inputs]
        tma.async_copy_global_to_shared(weight, place, full.index(stage), buffer)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_x(
    ring: gl.tuple,
    x: tma.tensor_descriptor,
    step: gl.tensor,
    row: gl.tensor,
    each: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """The same of x, from `row` on."""
    numbers, _, full, _ = ring
    GROUPS: gl.constexpr = TILE.groups
    stage = step % TILE.stages
    for group in gl.static_range(GROUPS):
        buffer = numbers.index(stage * GROUPS + group)
        tma.async_copy_global_to_shared(x, [row + group * ROWS, each * TILE.inputs], full.index(stage), buffer)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(
    group: gl.constexpr,
    ring: gl.tuple,
    results: gl.tensor,
    out: tma.tensor_descriptor,
    sizes: gl.tuple,
    TILE: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """A group's rows of all tiles. One product is under way while the stage of the one before is given back."""
    wait_for_inputs(EARLY)
    numbers, weights, full, empty = ring
    STAGES: gl.constexpr = TILE.stages
    GROUPS: gl.constexpr = TILE.groups
    COLUMNS: gl.constexpr = TILE.columns
    length = gl.cdiv(sizes[2], TILE.inputs)
    tall, wide = _tiles(sizes, TILE)
    step = 0
    for tile in range(gl.program_id(0), tall * wide, gl.num_programs(0)):
        row, output = _place(tile, sizes, TILE)
        sums = gl.zeros((ROWS, COLUMNS), gl.float32, sums_layout(TILE))
        for each in range(length):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), step // STAGES & 1)
            turned = weights.index(stage).permute((1, 0))
            sums = warpgroup_mma(numbers.index(stage * GROUPS + group), turned, sums, is_async=True)
            sums = warpgroup_mma_wait(num_outstanding=1, deps=(sums,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), pred=each > 0)
            step += 1
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES))
        _finish(sums, results, group, out, row + group * ROWS, output, TILE)
    tma.store_wait(0)


@gluon.jit  # type: ignore[untyped-decorator]
def _halves(values: gl.tensor) -> gl.tuple:
    """The left and the right half of the columns, where they are."""
    COLUMNS: gl.constexpr = values.shape[1]
    return gl.split(gl.permute(gl.reshape(values, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@gluon.jit  # type: ignore[untyped-decorator]
def _finish(
    sums: gl.tensor,
    results: gl.tensor,
    group: gl.constexpr,
    out: tma.tensor_descriptor,
    row: gl.tensor,
    output: gl.tensor,
    TILE: gl.constexpr,
) -> None:
    """Write sums [ROWS, columns], or of their halves silu(gate) · up, to out from (row, output) on."""
    if TILE.parts == 2:
        gate, up = _halves(sums)
        sums = gate / (1.0 + gl.exp(-gate)) * up
    _store_columns(sums, results, group, out, row, output)


@gluon.jit  # type: ignore[untyped-decorator]
def _store_columns(
    values: gl.tensor,
    results: gl.tensor,
    group: gl.constexpr,
    out: tma.tensor_descriptor,
    row: gl.tensor,
    output: gl.tensor,
) -> None:
    """Values [ROWS, STORED], or twice or four times as many columns."""
    COLUMNS: gl.constexpr = values.shape[1]
    if COLUMNS == STORED:
        _store_block(values, results.index(group * 2), out, row, output, 0)
    else:
        left, right = _halves(values)
        if COLUMNS > 2 * STORED:
            _store_columns(left, results, group, out, row, output)
            _store_columns(right, results, group, out, row, output + COLUMNS // 2)
        else:
            _store_block(left, results.index(group * 2), out, row, output, 1)
            _store_block(right, results.index(group * 2 + 1), out, row, output + STORED, 1)


@gluon.jit  # type: ignore[untyped-decorator]
def _store_block(
    values: gl.tensor,
    block: gl.tensor,
    out: tma.tensor_descriptor,
    row: gl.tensor,
    output: gl.tensor,
    UNDER_WAY: gl.constexpr,
) -> None:
    """Through a block that no copy reads any more once only so many of the group's last ones are under way: one where
    blocks take turns."""
    tma.store_wait(UNDER_WAY)
    gl.thread_barrier()
    block.store(values.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [row, output], block)
