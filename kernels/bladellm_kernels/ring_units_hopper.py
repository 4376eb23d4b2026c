"""The linear layer of a `UnitWeight` for Hopper: codes come by the copy engine and become tensor-core operands.

A program is some groups of four consumer warps, which multiply, and a producer warp that keeps a ring of tiles in
shared memory full: it asks for the units of the first ones before the inputs are ready, which each group waits for
itself. Groups lie beside each other along the outputs, where they share the inputs of a tile, or take the tiles of the
same outputs by turns, and add up their sums at the end; none waits for the others in between, so that one turns codes
into numbers while the products of another run. The product is transposed: the left operand is the weight, in registers:
matrices of units are read from shared memory in the order in which a product wants them, and turned into numbers there;
the right operand is x as it lies in memory. Tiles are divided among the programs as in `linear_hopper`, evenly or by
whole shares of a block.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.linear_division_hopper import Division, block_segments, tiles_of
from bladellm_kernels.linear_outputs_hopper import (
    NormInFront,
    Outputs,
    finish,
    norm_weight_of,
    residual_of_few_rows,
    row_factors,
)
from bladellm_kernels.linear_sums_hopper import join_segments, sums_layout
from bladellm_kernels.ring_factors_hopper import block_factors, load_factors, prefetch_factors
from bladellm_kernels.ring_products_hopper import Staged, add_products, most_registers, no_sums
from bladellm_kernels.ring_tiles_hopper import Cursor, Source, fill_ring, new_meetings, new_ring
from bladellm_kernels.weight_units_triton import WeightArguments


class Tiles(NamedTuple):
    """Tiles [first, stop) of a program, all of one block, of which the first one is `along` tiles along K."""

    first: gl.tensor
    stop: gl.tensor
    along: gl.tensor


class Share(NamedTuple):
    """Tiles [begin, end) of a program; partial: where it leaves sums; counters: of the blocks of 64 or 128 outputs."""

    work: Division
    begin: gl.tensor
    end: gl.tensor
    partial: gl.tensor
    counters: gl.tensor


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
    tokens [TILE.rows · j, TILE.rows · (j + 1)). A tile is TILE.inputs long, some steps, and of the outputs of TILE.wide
    groups.

    x: [tokens, columns]. codes: int16 [parts, tiles of a part, steps · 64, 32]. front, behind: a `NormInFront` and a
    `NormBehind`, or None; with them or a residual there is one j. partial: float32, two slots of a tile's sums a
    program; arrived: int32, zeros, one of every j and block of a group's outputs. FOLD: scales are multiplied into the
    codes and rounded to x's type.
    """
    let_next_start(EARLY)
    length = gl.cdiv(weight.steps, TILE.inputs // SHAPE.step)
    blocks = gl.cdiv(outputs, TILE.wide * TILE.outputs)
    share = _share(Division(gl.num_programs(0), blocks * length, length), partial, arrived, blocks, TILE)
    begin, end = share.begin, share.end
    first_token = gl.program_id(1) * TILE.rows
    source = Source(x, first_token, codes, length)
    ring, meetings = new_ring(y.dtype.element_ty, TILE), new_meetings(TILE)
    # The copy engine sees the barriers, and so do all groups, which meet as they start.
    fence_async_shared()
    first = Cursor(begin // length, begin % length, end - begin)
    y += first_token.to(gl.int64) * y_stride
    if front is not None:
        front = NormInFront(front.squares, gl.to_tensor(front.parts), front.eps)
    outs = Outputs(
        y, tokens - first_token, gl.to_tensor(outputs), gl.to_tensor(y_stride), gl.to_tensor(residual_stride), residual,
        bias, behind,
    )  # fmt: skip
    given = _as_tensors(weight), ring, meetings, front, outs, share, gl.to_tensor(columns)
    _start_groups(given, source, ring, first, SHAPE, TILE, SEGMENTS, FOLD, EARLY)


@gluon.jit  # type: ignore[untyped-decorator]
def _share(work: gl.tuple, partial: gl.tensor, arrived: gl.tensor, blocks: gl.tensor, TILE: gl.constexpr) -> Share:
    """Of this program."""
    SLOTS: gl.constexpr = 2 * TILE.wide * TILE.parts * TILE.outputs * TILE.rows
    begin, end = tiles_of(gl.program_id(0), work)
    partial += gl.program_id(1).to(gl.int64) * gl.num_programs(0) * SLOTS
    return Share(work, begin, end, partial, arrived + gl.program_id(1) * blocks * TILE.wide)


@gluon.jit  # type: ignore[untyped-decorator]
def _as_tensors(weight: gl.tuple) -> WeightArguments:
    """With numbers as tensors: a 1 is known to the compiler, which loses it among what groups of warps are given."""
    tiles, steps, groups = gl.to_tensor(weight.tiles), gl.to_tensor(weight.steps), gl.to_tensor(weight.groups)
    return WeightArguments(weight.codes, weight.scales, weight.zeros, tiles, steps, groups)


@gluon.jit  # type: ignore[untyped-decorator]
def _start_groups(
    work: gl.tuple,
    source: gl.tuple,
    ring: gl.tuple,
    first: gl.tuple,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    FOLD: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Groups of consumer warps, and the producer warp; registers are dealt out to them anew."""
    GROUPS: gl.constexpr = TILE.wide * TILE.deep
    MOST: gl.constexpr = most_registers(GROUPS)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply, (0, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (_multiply, (1, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (fill_ring, (source, ring, first, TILE, EARLY)),
            ],
            [4, 1],
            [MOST, 24],
        )
    elif GROUPS == 3:
        gl.warp_specialize(
            [
                (_multiply, (0, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (_multiply, (1, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (_multiply, (2, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (fill_ring, (source, ring, first, TILE, EARLY)),
            ],
            [4, 4, 1],
            [MOST, MOST, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply, (0, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (_multiply, (1, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (_multiply, (2, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (_multiply, (3, work, SHAPE, TILE, SEGMENTS, FOLD, EARLY)),
                (fill_ring, (source, ring, first, TILE, EARLY)),
            ],
            [4, 4, 4, 1],
            [MOST, MOST, MOST, 24],
        )


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply(
    group: gl.constexpr,
    given: gl.tuple,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    SEGMENTS: gl.constexpr,
    FOLD: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """A group's outputs of a program's tiles, or of those whose turn is its own."""
    weight, ring, meetings, front, outs, share, columns = given
    work = share.work
    PLACE: gl.constexpr = group % TILE.wide
    TURN: gl.constexpr = group // TILE.wide
    SLOTS: gl.constexpr = 2 * TILE.parts * TILE.outputs * TILE.rows
    partial = share.partial + PLACE * gl.num_programs(0) * SLOTS
    if group == 0:
        prefetch_factors(weight, share.begin, share.end, work.length, SHAPE, TILE)
    wait_for_inputs(EARLY)
    factors = row_factors(front, outs.rows, columns, TILE)
    tile = share.begin
    met = 0
    while tile < share.end:
        shared_block = tile // work.length
        stop = gl.minimum((shared_block + 1) * work.length, share.end)
        block = shared_block * TILE.wide + PLACE
        # Here, while tiles are on their way, and not behind the last one.
        lowest, segments = block_segments(shared_block, work)
        tiles = Tiles(tile - share.begin, stop - share.begin, tile - shared_block * work.length)
        sums = _multiply_block(weight, ring, block, tiles, PLACE, TURN, SHAPE, FOLD, TILE)
        if TILE.deep > 1:
            sums = _meet(sums, meetings, met, PLACE, TURN, TILE)
        if TURN == 0:
            asked, norm_weight = residual_of_few_rows(outs, block, TILE), norm_weight_of(outs, block, TILE)
            added = _by_parts(sums, TILE)
            last = True
            if SEGMENTS > 1:
                added, last = join_segments(added, partial, share.counters + block, lowest, segments, SEGMENTS, TILE)
            # The last tiles may be of fewer outputs than all groups have.
            if last and block * TILE.outputs < outs.outputs:
                finish(added, factors, asked, norm_weight, outs, block, TILE)
        met += 1
        tile = stop


@gluon.jit  # type: ignore[untyped-decorator]
def _meet(
    sums: gl.tensor,
    meetings: gl.tuple,
    met: gl.tensor,
    place: gl.constexpr,
    turn: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tensor:
    """The sums of all groups that take turns, for the first of them; the others' are as they were."""
    left, full, empty = meetings
    OTHERS: gl.constexpr = TILE.deep - 1
    if turn > 0:
        # The first time waits for the phase before the first one, which has ended.
        mbarrier.wait(empty.index(place), (met + 1) & 1)
        left.index(place * OTHERS + turn - 1).store(sums)
        mbarrier.arrive(full.index(place))
    else:
        mbarrier.wait(full.index(place), met & 1)
        for other in gl.static_range(OTHERS):
            sums += left.index(place * OTHERS + other).load(sums_layout(TILE))
        mbarrier.arrive(empty.index(place))
    return sums


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
def _multiply_block(
    weight: gl.tuple,
    ring: gl.tuple,
    block: gl.tensor,
    tiles: gl.tuple,
    place: gl.constexpr,
    turn: gl.constexpr,
    SHAPE: gl.constexpr,
    FOLD: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tensor:
    """The sums of a group's tiles of a block of outputs."""
    DEEP: gl.constexpr = TILE.deep
    STAGES: gl.constexpr = TILE.stages
    first, stop, along = tiles
    mine = first + (turn + DEEP - first % DEEP) % DEEP
    factors = block_factors(weight, block, SHAPE, FOLD, TILE)
    # Where none is the group's, those of another tile are loaded, which lies inside the weight, too.
    loaded = load_factors(factors, weight.steps, gl.minimum(mine, stop - 1) - first + along, SHAPE, TILE)
    sums = no_sums(TILE)
    for each in range(mine, stop, DEEP):
        later = load_factors(factors, weight.steps, gl.minimum(each + DEEP, stop - 1) - first + along, SHAPE, TILE)
        stage = each % STAGES
        mbarrier.wait(ring.full.index(stage), each // STAGES & 1)
        staged = Staged(ring.units.index(stage * TILE.wide + place), ring.numbers.index(stage), loaded)
        sums = add_products(sums, staged, SHAPE, FOLD, TILE)
        mbarrier.arrive(ring.empty.index(stage))
        loaded = later
    if SHAPE.group_steps == 0:
        sums *= loaded[0][0].to(gl.float32)[:, None]
    return sums
