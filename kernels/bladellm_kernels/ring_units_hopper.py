"""The linear layer of a `UnitWeight` for Hopper: codes come by the copy engine and become tensor-core operands.

As in `linear_hopper`, a program fills a ring of tiles in shared memory before its inputs are ready, the product is
transposed and its tiles divided evenly among the programs. The left operand is the weight, in registers: matrices of
units are read from shared memory in the order in which a product wants them, and turned into numbers there; the right
operand is x as it lies in memory.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.linear_division_hopper import Division, block_segments, tiles_of
from bladellm_kernels.linear_outputs_hopper import Outputs, finish, norm_weight_of, residual_of_few_rows, row_factors
from bladellm_kernels.linear_sums_hopper import join_segments, sums_layout
from bladellm_kernels.ring_factors_hopper import UnitTile, block_factors, load_factors, prefetch_factors
from bladellm_kernels.ring_tiles_hopper import TILE_ROWS, UNITS, Cursor, Source, fetch_units, fetch_x, new_ring
from bladellm_kernels.weight_units_triton import unit_parts


class Place(NamedTuple):
    """The stage that is read next and the parity of the ring's turn, and the tiles that are copied next."""

    stage: gl.tensor
    turn: gl.tensor
    units: Cursor
    numbers: Cursor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def units_layout(tile: UnitTile) -> gl.DistributedLinearLayout:
    """Of the units of a step, [parts, tiles, 64, 32], in registers: as a product's left operand [outputs of all parts,
    32] lies."""
    outputs = tile.outputs
    rows = [[bit // outputs, bit % outputs // 64, bit % 64, 0] for bit in _doublings(16, tile.parts * outputs)]
    in_warps = tile.warps.bit_length() - 1
    registers = [[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8], [0, 0, 0, 16], *rows[in_warps:]]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    shape = [tile.parts, outputs // 64, 64, 32]
    return gl.DistributedLinearLayout(registers, lanes, rows[:in_warps], [], shape)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _doublings(first: int, end: int) -> list[int]:
    return [1 << bit for bit in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def ring_units_kernel(
    x: tma.tensor_descriptor,
    codes: tma.tensor_descriptor,
    weight: gl.tuple,
    bias: gl.tensor | None,
    residual: gl.tensor | None,
    y: gl.tensor,
    front: gl.tuple | None,
    behind: gl.tuple | None,
    partial: gl.tensor,
    arrived: gl.tensor,
    tokens: gl.tensor,
    outputs: gl.tensor,
    columns: gl.tensor,
    residual_stride: gl.tensor,
    y_stride: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    FOLD: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Program (p, j) takes tiles [p · T / P, (p + 1) · T / P) of T, counted along K and then along the outputs, for
    tokens [TILE.rows · j, TILE.rows · (j + 1)). A tile is TILE.inputs long, some steps.

    x: [tokens, columns]. codes: int16 [parts, tiles of a part, steps · 64, 32]. front, behind: a `NormInFront` and a
    `NormBehind`, or None; with them or a residual there is one j. partial: float32, two slots of a tile's sums a
    program; arrived: int32, zeros, one of every j and block of outputs. FOLD: scales are multiplied into the codes and
    rounded to x's type.
    """
    let_next_start(EARLY and TILE.late == 0)
    length = gl.cdiv(weight.steps, TILE.inputs // SHAPE.step)
    blocks = gl.cdiv(outputs, TILE.outputs)
    work = Division(gl.num_programs(0), blocks * length, length)
    begin, end = tiles_of(gl.program_id(0), work)
    first_token = gl.program_id(1) * TILE.rows
    source = Source(x, first_token, codes, length)
    ring = new_ring(y.dtype.element_ty, TILE)
    STAGES: gl.constexpr = TILE.stages
    units = Cursor(begin // length, begin % length, end - begin)
    for stage in gl.static_range(STAGES):
        units = fetch_units(source, ring, stage, units, TILE)
    prefetch_factors(weight, begin, end, length, SHAPE, TILE)
    wait_for_inputs(EARLY)
    numbers = Cursor(begin // length, begin % length, end - begin)
    for stage in gl.static_range(STAGES):
        numbers = fetch_x(source, ring, stage, numbers, TILE)
    partial += gl.program_id(1).to(gl.int64) * gl.num_programs(0) * (2 * TILE.parts * TILE.outputs * TILE.rows)
    y += first_token.to(gl.int64) * y_stride
    outs = Outputs(y, tokens - first_token, outputs, y_stride, residual_stride, residual, bias, behind)
    counters = arrived + gl.program_id(1) * blocks
    place = Place(0, 0, units, numbers)
    factors = row_factors(front, tokens, columns, TILE)
    _take_blocks(
        weight, source, ring, place, factors, outs, work, begin, end, partial, counters, SHAPE, TILE, SEGMENTS, FOLD,
        EARLY,
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _take_blocks(
    weight: gl.tuple,
    source: gl.tuple,
    ring: gl.tuple,
    place: gl.tuple,
    factors: gl.tuple,
    outs: gl.tuple,
    work: gl.tuple,
    tile: gl.tensor,
    end: gl.tensor,
    partial: gl.tensor,
    counters: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    FOLD: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """All tiles of a program, of the first of which the ring's are on their way."""
    late = gl.maximum(end - TILE.late, tile)
    while tile < end:
        block = tile // work.length
        stop = gl.minimum((block + 1) * work.length, end)
        # Here, while tiles are on their way, and not behind the last one.
        lowest, segments = block_segments(block, work)
        sums, place = _multiply_block(weight, source, ring, place, block, tile, stop, late, SHAPE, FOLD, EARLY, TILE)
        asked, norm_weight = residual_of_few_rows(outs, block, TILE), norm_weight_of(outs, block, TILE)
        added = _by_parts(sums, TILE)
        last = True
        if SEGMENTS > 1:
            added, last = join_segments(added, partial, counters + block, lowest, segments, SEGMENTS, TILE)
        if last:
            finish(added, factors, asked, norm_weight, outs, block, TILE)
        tile = stop


@gluon.jit  # type: ignore[untyped-decorator]
def _by_parts(sums: gl.tensor, TILE: gl.constexpr) -> gl.tuple:
    """The sums of each part, of those of all outputs."""
    found: gl.tuple = (sums,)
    if TILE.parts == 2:
        OUTPUTS: gl.constexpr = TILE.outputs
        ROWS: gl.constexpr = TILE.rows
        pairs = gl.permute(gl.reshape(sums, [2, OUTPUTS, ROWS]), (1, 2, 0))
        first, second = gl.split(pairs)
        found = (
            gl.convert_layout(first, sums_layout(TILE), assert_trivial=True),
            gl.convert_layout(second, sums_layout(TILE), assert_trivial=True),
        )
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _no_sums(TILE: gl.constexpr) -> gl.tensor:
    """The sums of nothing, float32 [outputs of all parts, tokens]."""
    OUTPUTS: gl.constexpr = TILE.parts * TILE.outputs
    ROWS: gl.constexpr = TILE.rows
    return gl.zeros((OUTPUTS, ROWS), gl.float32, sums_layout(TILE))


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_block(
    weight: gl.tuple,
    source: gl.tuple,
    ring: gl.tuple,
    place: gl.tuple,
    block: gl.tensor,
    tile: gl.tensor,
    stop: gl.tensor,
    late: gl.tensor,
    SHAPE: gl.constexpr,
    FOLD: gl.constexpr,
    EARLY: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """The sums of tiles [tile, stop) of a block of outputs, and the place in the ring behind them. late: the tile with
    which the next kernel may start."""
    STAGES: gl.constexpr = TILE.stages
    stage, turn, units, numbers = place
    first = tile - block * source.length
    factors = block_factors(weight, block, SHAPE, FOLD, TILE)
    loaded = load_factors(factors, weight.steps, first, SHAPE, TILE)
    sums = _no_sums(TILE)
    for each in range(tile, stop):
        if EARLY and TILE.late > 0 and each == late:
            let_next_start(True)
        after = gl.minimum(each + 1, stop - 1) - block * source.length
        later = load_factors(factors, weight.steps, after, SHAPE, TILE)
        sums = _add_products(sums, ring, stage, turn, loaded, SHAPE, FOLD, TILE)
        loaded = later
        # All warps have read the stage that is filled again.
        gl.thread_barrier()
        units = fetch_units(source, ring, stage, units, TILE)
        numbers = fetch_x(source, ring, stage, numbers, TILE)
        turn ^= stage == STAGES - 1
        stage = gl.where(stage == STAGES - 1, 0, stage + 1)
    if SHAPE.group_steps == 0:
        sums *= loaded[0][0].to(gl.float32)[:, None]
    return sums, Place(stage, turn, units, numbers)


@gluon.jit  # type: ignore[untyped-decorator]
def _add_products(
    sums: gl.tensor,
    ring: gl.tuple,
    stage: gl.tensor,
    turn: gl.tensor,
    factors: gl.tuple,
    SHAPE: gl.constexpr,
    FOLD: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tensor:
    """Sums plus the product of a stage, as soon as its tile is here, in the ring's turn of that parity; scaled unless
    the weight has one group. factors: scales and zero points of each group of each step."""
    mbarrier.wait(ring.barriers.index(stage), turn)
    if FOLD or SHAPE.group_steps == 0:
        STEPS: gl.constexpr = TILE.steps
        for step in gl.static_range(STEPS):
            parts = _operands(ring, stage, step, factors, SHAPE, FOLD, TILE)
            columns = ring.numbers.index(stage).slice(step * SHAPE.step, SHAPE.step, 1)
            sums = _add_parts(sums, parts, columns, True)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    else:
        sums = _add_groups(sums, ring, stage, factors, SHAPE, TILE)
    return sums


@gluon.jit  # type: ignore[untyped-decorator]
def _add_groups(
    sums: gl.tensor, ring: gl.tuple, stage: gl.tensor, factors: gl.tuple, SHAPE: gl.constexpr, TILE: gl.constexpr
) -> gl.tensor:
    """Sums plus the products of each group of a stage times its scale, each waited for behind the next operands."""
    STEPS: gl.constexpr = TILE.steps
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    SIZE: gl.constexpr = SHAPE.group_parts
    product = _no_sums(TILE)
    for step in gl.static_range(STEPS):
        parts = _operands(ring, stage, step, factors, SHAPE, False, TILE)
        for group in gl.static_range(GROUPS):
            if step * GROUPS + group > 0:
                sums = _add_scaled(sums, product, factors[0][step * GROUPS + group - 1])
            columns = ring.numbers.index(stage).slice(step * SHAPE.step + group * SIZE * UNITS, SIZE * UNITS, 1)
            product = _add_parts(_no_sums(TILE), parts[group * SIZE : (group + 1) * SIZE], columns, False)
    return _add_scaled(sums, product, factors[0][STEPS * GROUPS - 1])


@gluon.jit  # type: ignore[untyped-decorator]
def _add_scaled(sums: gl.tensor, product: gl.tensor, scale: gl.tensor) -> gl.tensor:
    """Sums plus a product that may still be on its way, times the scale of each output."""
    return sums + warpgroup_mma_wait(num_outstanding=0, deps=(product,)) * scale.to(gl.float32)[:, None]


@gluon.jit  # type: ignore[untyped-decorator]
def _add_parts(
    sums: gl.tensor,
    parts: gl.tuple,
    columns: gl.shared_memory_descriptor,
    ADD: gl.constexpr,
) -> gl.tensor:
    """Sums, where ADD, plus the products of parts and their inputs, on their way."""
    PARTS: gl.constexpr = len(parts)
    for part in gl.static_range(PARTS):
        right = columns.slice(part * UNITS, UNITS, 1).permute((1, 0))
        sums = warpgroup_mma(parts[part], right, sums, use_acc=ADD or part > 0, is_async=True)
    return sums


@gluon.jit  # type: ignore[untyped-decorator]
def _operands(
    ring: gl.tuple,
    stage: gl.tensor,
    step: gl.constexpr,
    factors: gl.tuple,
    SHAPE: gl.constexpr,
    FOLD: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """The parts of the units of a step of a stage as left operands, `code - zero` each, FOLD: times its scale."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(TILE), k_width=2)
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    PARTS: gl.constexpr = SHAPE.parts
    OUTPUTS: gl.constexpr = TILE.parts * TILE.outputs
    matrices = ring.units.index(stage).slice(step * TILE_ROWS, TILE_ROWS, 2)
    units = gl.reshape(matrices.load(units_layout(TILE)), [OUTPUTS, UNITS])
    units = gl.convert_layout(units, LEFT, assert_trivial=True)
    points: gl.tuple = ()
    for part in gl.static_range(4):
        if SHAPE.has_zeros:
            zero = factors[1][step * GROUPS + part // SHAPE.group_parts].to(gl.int32)
            points += (zero[:, None] + (units & 0).to(gl.int32),)
        else:
            points += (gl.full([OUTPUTS, UNITS], 8, gl.int32, LEFT),)
    parts = unit_parts(units, points, ring.numbers.dtype, SHAPE)
    if FOLD and SHAPE.group_steps != 0:
        folded: gl.tuple = ()
        for part in gl.static_range(PARTS):
            scale = factors[0][step * GROUPS + part // SHAPE.group_parts]
            folded += (parts[part] * scale.to(ring.numbers.dtype)[:, None],)
        parts = folded
    return parts
