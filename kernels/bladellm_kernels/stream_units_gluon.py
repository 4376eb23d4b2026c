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
from bladellm_kernels.stream_sums_gluon import Outputs, add_warps, added_layout, join_splits, new_exchanges, write_sums
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
    bias: gl.tensor,
    y: gl.tensor,
    partial: gl.tensor,
    arrived: gl.tensor,
    x_stride: gl.tensor,
    x_step: gl.tensor,
    y_stride: gl.tensor,
    tokens: gl.tensor,
    rows: gl.tensor,
    columns: gl.tensor,
    tiles: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    DEPTH: gl.constexpr,
    SPLITS: gl.constexpr,
    TURNS: gl.constexpr,
    RAW: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Program (i, j, k) adds up steps [j WARPS STEPS, (j + 1) WARPS STEPS) of K of tiles i, i + programs, ... of ROWS
    outputs for tokens [k TOKENS, (k + 1) TOKENS).

    x: [tokens, columns], y: [tokens, rows]. partial: float32 [TOKENS tiles, tiles, SPLITS, ROWS, TOKENS] and arrived:
    int32, zeros, one of each i and k, where SPLITS > 1. TURNS: tiles whose splits are added up at a time, a power of
    two. RAW: see `_start`.
    """
    OUTPUTS: gl.constexpr = ROWS * TOKENS
    DTYPE: gl.constexpr = x.dtype.element_ty
    let_next_start(EARLY)
    of_tokens = gl.program_id(2).to(gl.int64)
    here = tokens - gl.program_id(2) * TOKENS
    inputs = Inputs(x + of_tokens * TOKENS * x_stride, x_stride, x_step, here, columns)
    outputs = Outputs(weight.scales, bias, y + of_tokens * TOKENS * y_stride, y_stride, here, rows, tiles)
    partial += of_tokens * tiles * (SPLITS * OUTPUTS)
    tile, stride = gl.program_id(0), gl.num_programs(0)
    step = gl.program_id(1) * (WARPS * STEPS)
    fetched = _fetch_first_tiles(weight, tile, stride, tiles, step, SHAPE, ROWS, WARPS, STEPS, DEPTH, RAW)
    exchanges = new_exchanges(DEPTH, WARPS, OUTPUTS)
    wait_for_inputs(EARLY)
    operands = _load_inputs(inputs, step, SHAPE, TOKENS, WARPS, STEPS)
    offsets = _offsets(operands, DTYPE, SHAPE, ROWS, TOKENS, WARPS, STEPS, RAW)
    place = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, added_layout(WARPS, OUTPUTS)))
    for _turn in range(gl.cdiv(gl.cdiv(tiles - tile, stride), DEPTH)):
        for ahead in gl.static_range(DEPTH):
            total = _multiply_tile(fetched[0], operands, offsets, DTYPE, SHAPE, ROWS, TOKENS, WARPS, STEPS, RAW)
            later = (_fetch_tile(weight, tile + DEPTH * stride, tiles, step, SHAPE, ROWS, WARPS, STEPS, RAW),)
            fetched = fetched[1:] + later
            sums = add_warps(total, exchanges[ahead], WARPS, OUTPUTS)
            write_sums(sums, place, tile, outputs, partial, SHAPE, ROWS, TOKENS, SPLITS, HAS_BIAS)
            tile += stride
    if SPLITS > 1:
        join_splits(outputs, partial, arrived, SHAPE, ROWS, TOKENS, WARPS, SPLITS, TURNS, HAS_BIAS)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_first_tiles(
    weight: gl.tuple,
    tile: gl.tensor,
    stride: gl.tensor,
    tiles: gl.tensor,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    DEPTH: gl.constexpr,
    RAW: gl.constexpr,
) -> gl.tuple:
    """What `_fetch_tile` gives for each of DEPTH tiles from `tile` on."""
    fetched: gl.tuple = ()
    for ahead in gl.static_range(DEPTH):
        fetched += (_fetch_tile(weight, tile + ahead * stride, tiles, first_step, SHAPE, ROWS, WARPS, STEPS, RAW),)
    return fetched


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_tile(
    weight: gl.tuple,
    tile: gl.tensor,
    tiles: gl.tensor,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    RAW: gl.constexpr,
) -> gl.tuple:
    """Tuples of the units, scales and zero points of each warp's STEPS steps of a tile; zeros beyond the last tile."""
    LOADED: gl.constexpr = codes_layout(WARPS, 1, ROWS)
    SUMS: gl.constexpr = sums_layout(WARPS, 1)
    ZEROS: gl.constexpr = SUMS if RAW else gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))[:, None][:, :, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))[None, :][:, :, None]
    pair = gl.arange(0, UNITS // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, :][:, None, :]
    live = tile < tiles
    codes, factor = first_row(weight, gl.minimum(tile, tiles - 1) * ROWS)
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
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    STEPS: gl.constexpr,
) -> gl.tuple:
    """The parts of x of each warp's STEPS steps as right operands, [WARPS, 32, TOKENS], zeros beyond the last column.

    Tokens beyond the last one repeat it; their outputs are not stored.
    """
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
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    RAW: gl.constexpr,
) -> gl.tuple:
    """Of each step and each of its groups `-Σx`, times 136 where that is every zero point's, [WARPS, TOKENS]."""
    SUMS: gl.constexpr = sums_layout(WARPS, 1)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    found: gl.tuple = ()
    if RAW:
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
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    RAW: gl.constexpr,
) -> gl.tensor:
    """Each warp's sums of a tile, [WARPS, ROWS, TOKENS], scaled unless the weight has one group."""
    SUMS: gl.constexpr = sums_layout(WARPS, 1)
    units, scales, zeros = fetched
    total = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    PARTS: gl.constexpr = SHAPE.parts
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    for index in gl.static_range(STEPS):
        if RAW:
            parts = raw_operands(units[index], dtype, SHAPE, ROWS, WARPS)
        else:
            parts = unit_operands(units[index], zeros[index], dtype, SHAPE, ROWS, WARPS, 1)
        for group in gl.static_range(GROUPS):
            if RAW:
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
