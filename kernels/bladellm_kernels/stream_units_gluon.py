"""The linear layer of a `UnitWeight` for a few tokens: x stays in registers while the weight streams past it.

The warps of a program each hold their part of x and go through tiles of outputs; of several tiles the codes are on
their way into registers, the first ones asked for before the kernel's inputs are ready. Per tile the warps add up their
sums through shared memory, at one barrier. Operands are laid out as in `unit_operands_gluon.py`. Codes of 4 bits are
multiplied as `128 + code`, which takes no arithmetic, each sum beginning at `-(128 + zero) · Σx`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.linear_outputs_hopper import Outputs
from bladellm_kernels.stream_sums_gluon import (
    add_warps,
    ask_for_tile,
    finish_tile,
    join_splits,
    leave_program_squares,
    leave_sums,
    new_exchanges,
    no_squares,
    token_factors,
)
from bladellm_kernels.unit_operands_gluon import (
    STEP_PAIRS,
    UNITS,
    Inputs,
    codes_layout,
    first_row,
    inputs_layout,
    interleaved,
    load_factors,
    raw_operands,
    sums_layout,
    unit_operands,
)


@gluon.jit(do_not_specialize=["tokens", "tiles"])  # type: ignore[untyped-decorator]
def stream_units_kernel(
    x: gl.tensor,
    weight: gl.tuple,
    bias: gl.tensor | None,
    residual: gl.tensor | None,
    y: gl.tensor,
    front: gl.tuple | None,
    behind: gl.tuple | None,
    partial: gl.tensor,
    arrived: gl.tensor,
    x_stride: gl.tensor,
    x_step: gl.tensor,
    residual_stride: gl.tensor,
    y_stride: gl.tensor,
    tokens: gl.tensor,
    rows: gl.tensor,
    columns: gl.tensor,
    tiles: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Program (i, j, k) adds up the j-th part of the steps of K, as many as TILE.warps times TILE.steps, of tiles i,
    i + programs, ... for tokens [k TILE.tokens, (k + 1) TILE.tokens).

    x: [tokens, columns]; y, residual: [tokens, rows]. front, behind: a `NormInFront` and a `NormBehind` of as many
    parts as there are i, or None; with them or a residual there is one k. partial: float32 [TOKENS tiles, tiles, parts,
    splits, ROWS, TOKENS] and arrived: int32, zeros, one of each i and k, where K is split.
    """
    let_next_start(EARLY)
    of_tokens = gl.program_id(2).to(gl.int64) * TILE.tokens
    here = tokens - gl.program_id(2) * TILE.tokens
    inputs = Inputs(x + of_tokens * x_stride, x_stride, x_step, here, columns)
    outs = Outputs(y + of_tokens * y_stride, here, rows, y_stride, residual_stride, residual, bias, behind)
    partial += of_tokens * tiles * (TILE.parts * TILE.splits * TILE.rows)
    tile, stride = gl.program_id(0), gl.num_programs(0)
    step = gl.program_id(1) * (TILE.warps * TILE.steps)
    fetched = _fetch_first_tiles(weight, tile, stride, tiles, rows, step, SHAPE, TILE)
    exchanges = new_exchanges(TILE)
    wait_for_inputs(EARLY)
    _take_tiles(weight, fetched, exchanges, inputs, outs, front, tiles, step, partial, SHAPE, TILE)
    if TILE.splits > 1:
        join_splits(outs, weight, front, columns, tiles, partial, arrived, SHAPE, TILE)


@gluon.jit  # type: ignore[untyped-decorator]
def _take_tiles(
    weight: gl.tuple,
    fetched: gl.tuple,
    exchanges: gl.tuple,
    inputs: gl.tuple,
    outs: gl.tuple,
    front: gl.tuple | None,
    tiles: gl.tensor,
    step: gl.tensor,
    partial: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> None:
    """Multiply all tiles of a program, of the first of which the codes were fetched, and write their outputs or leave
    the sums of a split."""
    DEPTH: gl.constexpr = TILE.depth
    PARTS: gl.constexpr = TILE.parts
    DTYPE: gl.constexpr = inputs.x.dtype.element_ty
    tile, stride = gl.program_id(0), gl.num_programs(0)
    operands = _load_inputs(inputs, step, SHAPE, TILE)
    asked: gl.tuple = ()
    for ahead in gl.static_range(DEPTH):
        asked += (ask_for_tile(outs, weight, tile + ahead * stride, SHAPE, TILE),)
    factors = token_factors(front, inputs, TILE)
    offsets = _offsets(operands, DTYPE, SHAPE, TILE)
    squares = no_squares(outs, TILE)
    for _turn in range(gl.cdiv(gl.cdiv(tiles - tile, stride), DEPTH)):
        for ahead in gl.static_range(DEPTH):
            later = tile + DEPTH * stride
            sums: gl.tuple = ()
            for part in gl.static_range(PARTS):
                total = _multiply_tile(fetched[0], operands, offsets, DTYPE, SHAPE, TILE)
                after = (_fetch_tile(weight, later, tiles, part * outs.outputs, step, SHAPE, TILE),)
                fetched = fetched[1:] + after
                sums += (add_warps(total, exchanges[ahead * PARTS + part], TILE),)
            if TILE.splits == 1:
                squares = finish_tile(sums, factors, asked[0], squares, outs, tile, TILE)
            else:
                leave_sums(sums, outs, tile, tiles, partial, TILE)
            after = (ask_for_tile(outs, weight, later, SHAPE, TILE),)
            asked = asked[1:] + after
            tile += stride
    if TILE.splits == 1:
        leave_program_squares(squares, outs, TILE)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_first_tiles(
    weight: gl.tuple,
    tile: gl.tensor,
    stride: gl.tensor,
    tiles: gl.tensor,
    rows: gl.tensor,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """What `_fetch_tile` gives for each part of each of DEPTH tiles from `tile` on."""
    DEPTH: gl.constexpr = TILE.depth
    PARTS: gl.constexpr = TILE.parts
    fetched: gl.tuple = ()
    for ahead in gl.static_range(DEPTH):
        each = tile + ahead * stride
        for part in gl.static_range(PARTS):
            fetched += (_fetch_tile(weight, each, tiles, part * rows, first_step, SHAPE, TILE),)
    return fetched


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_tile(
    weight: gl.tuple,
    tile: gl.tensor,
    tiles: gl.tensor,
    part_row: gl.tensor,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Tuples of the units, scales and zero points of each warp's STEPS steps of a tile; zeros beyond the last tile.
    part_row: the first row of the tile's part."""
    ROWS: gl.constexpr = TILE.rows
    WARPS: gl.constexpr = TILE.warps
    STEPS: gl.constexpr = TILE.steps
    LOADED: gl.constexpr = codes_layout(WARPS, 1, ROWS)
    SUMS: gl.constexpr = sums_layout(WARPS, 1)
    ZEROS: gl.constexpr = SUMS if TILE.raw else gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))[:, None][:, :, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))[None, :][:, :, None]
    pair = gl.arange(0, UNITS // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, :][:, None, :]
    live = tile < tiles
    codes, factor = first_row(weight, part_row + gl.minimum(tile, tiles - 1) * ROWS)
    places = warp * STEP_PAIRS + row * (UNITS // 2) + pair
    units: gl.tuple = ()
    scales: gl.tuple = ()
    zeros: gl.tuple = ()
    for index in gl.static_range(STEPS):
        start = first_step + index * WARPS
        wanted = live & (places >= 0)
        if not SHAPE.even:
            wanted &= start + warp + row * 0 + pair * 0 < weight.steps
        units += (gl.load(codes + start * STEP_PAIRS + places, mask=wanted, other=0),)
        scales += (
            load_factors(
                weight.scales + factor, weight.steps, weight.groups, start, SHAPE.group_steps != 0, SHAPE, ROWS, WARPS,
                SUMS,
            ),
        )  # fmt: skip
        zeros += (
            load_factors(
                weight.zeros + factor, weight.steps, weight.groups, start, SHAPE.has_zeros, SHAPE, ROWS, WARPS, ZEROS
            ),
        )
    return units, scales, zeros


@gluon.jit  # type: ignore[untyped-decorator]
def _load_inputs(
    inputs: gl.tuple,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """The parts of x of each warp's STEPS steps as right operands, [WARPS, 32, TOKENS], zeros beyond the last column.

    Tokens beyond the last one repeat it; their outputs are not stored.
    """
    TOKENS: gl.constexpr = TILE.tokens
    WARPS: gl.constexpr = TILE.warps
    STEPS: gl.constexpr = TILE.steps
    LOADED: gl.constexpr = inputs_layout(WARPS, 1, TOKENS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=sums_layout(WARPS, 1), k_width=2)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))[:, None][:, :, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))[None, :][:, :, None]
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, :][:, None, :]
    places = (warp * SHAPE.step + unit) * inputs.step + gl.minimum(token, inputs.tokens - 1) * inputs.stride
    found: gl.tuple = ()
    PARTS: gl.constexpr = SHAPE.parts
    for index in gl.static_range(STEPS):
        for part in gl.static_range(PARTS):
            start = (first_step + index * WARPS) * SHAPE.step + part * UNITS
            if SHAPE.even:
                numbers = gl.load(inputs.x + start * inputs.step + places)
            else:
                known = start + warp * SHAPE.step + unit + token * 0 < inputs.columns
                numbers = gl.load(inputs.x + start * inputs.step + places, mask=known, other=0.0)
            found += (gl.convert_layout(gl.permute(interleaved(numbers, TOKENS, WARPS), (0, 2, 1)), RIGHT),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _offsets(
    operands: gl.tuple,
    dtype: gl.constexpr,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tuple:
    """Of each step and each of its groups `-Σx`, times 136 where that is every zero point's, [WARPS, TOKENS]."""
    ROWS: gl.constexpr = TILE.rows
    TOKENS: gl.constexpr = TILE.tokens
    WARPS: gl.constexpr = TILE.warps
    STEPS: gl.constexpr = TILE.steps
    SUMS: gl.constexpr = sums_layout(WARPS, 1)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    found: gl.tuple = ()
    if TILE.raw:
        FACTOR: gl.constexpr = -1.0 if SHAPE.has_zeros else -136.0
        PARTS: gl.constexpr = SHAPE.parts
        factors = gl.full([WARPS, ROWS, UNITS], FACTOR, dtype, layout=LEFT)
        for index in gl.static_range(STEPS):
            sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
            for part in gl.static_range(PARTS):
                sums = mma_v2(factors, operands[index * PARTS + part], sums)
                if (part + 1) % SHAPE.group_parts == 0:
                    # All rows are the same: they add up to exactly their number times one.
                    found += (gl.sum(sums, 1) * (1 / ROWS),)
                    sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_tile(
    fetched: gl.tuple,
    operands: gl.tuple,
    offsets: gl.tuple,
    dtype: gl.constexpr,
    SHAPE: gl.constexpr,
    TILE: gl.constexpr,
) -> gl.tensor:
    """Each warp's sums of a tile, [WARPS, ROWS, TOKENS], scaled unless the weight has one group."""
    ROWS: gl.constexpr = TILE.rows
    TOKENS: gl.constexpr = TILE.tokens
    WARPS: gl.constexpr = TILE.warps
    STEPS: gl.constexpr = TILE.steps
    SUMS: gl.constexpr = sums_layout(WARPS, 1)
    units, scales, zeros = fetched
    total = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    PARTS: gl.constexpr = SHAPE.parts
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    for index in gl.static_range(STEPS):
        if TILE.raw:
            parts = raw_operands(units[index], dtype, SHAPE, ROWS, WARPS)
        else:
            parts = unit_operands(units[index], zeros[index], dtype, SHAPE, ROWS, WARPS, 1)
        for group in gl.static_range(GROUPS):
            if TILE.raw:
                sums = _start(offsets[index * GROUPS + group], zeros[index][group], SHAPE, ROWS)
            else:
                sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
            for part in gl.static_range(group * SHAPE.group_parts, (group + 1) * SHAPE.group_parts):
                sums = mma_v2(parts[part], operands[index * PARTS + part], sums)
            if SHAPE.group_steps != 0:
                total += sums * scales[index][group].to(gl.float32)[:, :, None]
            else:
                total += sums
    return total


@gluon.jit  # type: ignore[untyped-decorator]
def _start(offset: gl.tensor, zero: gl.tensor, SHAPE: gl.constexpr, ROWS: gl.constexpr) -> gl.tensor:
    """What sums of products of `128 + code` begin at, so that they become those of `code - zero`."""
    WARPS: gl.constexpr = offset.shape[0]
    TOKENS: gl.constexpr = offset.shape[1]
    if SHAPE.has_zeros:
        sums = offset[:, None, :] * (zero.to(gl.float32)[:, :, None] + 128.0)
    else:
        sums = offset[:, None, :] + gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums_layout(WARPS, 1))
    return sums
