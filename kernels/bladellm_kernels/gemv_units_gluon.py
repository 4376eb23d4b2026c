"""The linear layer of a `UnitWeight` for a few tokens: codes go from memory straight into tensor-core registers.

The warps of a program share ROWS outputs and take turns along K, so nothing is exchanged before one sum at the end and
no program waits for another. Operands are laid out as in `unit_operands_gluon.py`. What a round multiplies was asked
for one round before, the first round before the kernel's inputs are ready.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.linear_outputs_hopper import (
    Outputs,
    factors_from,
    leave_squares,
    norm_weight_at,
    residual_at,
    squares_at,
    write_outputs,
)
from bladellm_kernels.unit_operands_gluon import (
    STEP_PAIRS,
    TILE_ROWS,
    UNITS,
    Inputs,
    codes_layout,
    first_row,
    inputs_layout,
    interleaved,
    load_factors,
    scales_at,
    sums_layout,
    unit_operands,
)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def outputs_layout(warps: int, tokens: int) -> gl.BlockedLayout:
    """Of [rows, tokens] on the way to memory, where rows lie side by side."""
    across = min(warps, tokens)
    return gl.BlockedLayout([1, 1], [32, 1], [warps // across, across], [0, 1])


@gluon.jit(do_not_specialize=["tokens", "splits", "share"])  # type: ignore[untyped-decorator]
def gemv_units_kernel(
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
    splits: gl.tensor,
    share: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    ONE_ROUND: gl.constexpr,
    SPLIT: gl.constexpr,
    SQUARES: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Program (i, j) adds up steps [share j, share (j + 1)) of K for outputs [ROWS i, ROWS (i + 1)) of all tokens.

    WARPS along K by ROW_WARPS along the outputs; a round is STEPS steps of each warp, a share whole rounds, ONE_ROUND:
    not more than one. x: [tokens, columns]; y, residual: [tokens, rows]. front, behind: a `NormInFront` of SQUARES
    partial sums at most and a `NormBehind` of as many as there are i, or None. partial: float32 [programs, TOKENS,
    ROWS] and arrived: int32, zeros, one of each i, where K is split.
    """
    OUT: gl.constexpr = outputs_layout(WARPS * ROW_WARPS, TOKENS)
    let_next_start(EARLY)
    first = gl.program_id(0) * ROWS
    codes, factor = first_row(weight, first)
    step = gl.program_id(1) * share if SPLIT else 0
    fetched = _fetch_round(weight, codes, factor, step, SHAPE, ROWS, WARPS, ROW_WARPS, STEPS)
    wait_for_inputs(EARLY)
    inputs = Inputs(x, x_stride, x_step, tokens, columns)
    outs = Outputs(y, tokens, rows, y_stride, residual_stride, residual, bias, behind)
    # Asked for now; of a split only the last program uses it.
    squares = squares_at(front, tokens, TOKENS, SQUARES, WARPS * ROW_WARPS)
    asked = _ask_for_outputs(outs, weight, first, SHAPE, ROWS, TOKENS, OUT)
    total = _multiply_rounds(
        fetched, weight, codes, factor, inputs, step, share, SHAPE, ROWS, TOKENS, WARPS, ROW_WARPS, STEPS, ONE_ROUND
    )
    sums = gl.convert_layout(gl.sum(total, 0), OUT)
    last = True
    if SPLIT:
        sums, last = _join_splits(sums, partial, arrived + gl.program_id(0), splits, ROWS, TOKENS, OUT)
    if last:
        factors = factors_from(squares, front, columns, gl.SliceLayout(0, OUT))
        _finish(sums, factors, asked, outs, first, ROWS, TOKENS, OUT)


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_rounds(
    fetched: gl.tuple,
    weight: gl.tuple,
    codes: gl.tensor,
    factor: gl.tensor,
    inputs: gl.tuple,
    step: gl.tensor,
    share: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    STEPS: gl.constexpr,
    ONE_ROUND: gl.constexpr,
) -> gl.tensor:
    """A program's sums from `step` on, [WARPS, ROWS, TOKENS], the codes of whose first round were fetched."""
    ROUND: gl.constexpr = WARPS * STEPS
    total = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, sums_layout(WARPS, ROW_WARPS))
    if not ONE_ROUND:
        for _round in range((gl.minimum(share, weight.steps - step) - 1) // ROUND):
            after = _fetch_round(weight, codes, factor, step + ROUND, SHAPE, ROWS, WARPS, ROW_WARPS, STEPS)
            total = _multiply_round(total, fetched, inputs, step, SHAPE, ROWS, TOKENS, WARPS, ROW_WARPS, STEPS)
            fetched = after
            step += ROUND
    return _multiply_round(total, fetched, inputs, step, SHAPE, ROWS, TOKENS, WARPS, ROW_WARPS, STEPS)


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch_round(
    weight: gl.tuple,
    codes: gl.tensor,
    factor: gl.tensor,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    STEPS: gl.constexpr,
) -> gl.tuple:
    """Tuples of the units, scales and zero points of each warp's STEPS steps from first_step on, zeros beyond the last.

    codes: pointer to the program's first row; factor: where its scales and zero points begin.
    """
    LOADED: gl.constexpr = codes_layout(WARPS, ROW_WARPS, ROWS)
    SUMS: gl.constexpr = sums_layout(WARPS, ROW_WARPS)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))[:, None][:, :, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))[None, :][:, :, None]
    in_tile = row % TILE_ROWS
    pair = gl.arange(0, UNITS // 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, :][:, None, :]
    units: gl.tuple = ()
    scales: gl.tuple = ()
    zeros: gl.tuple = ()
    for index in gl.static_range(STEPS):
        start = first_step + index * WARPS
        places = codes + start * STEP_PAIRS + (warp * STEP_PAIRS + in_tile * (UNITS // 2) + pair)
        if ROWS > TILE_ROWS:
            # Tiles come in pairs, so that 128 rows may always be read.
            places += row // TILE_ROWS * (weight.steps * STEP_PAIRS)
        if SHAPE.even:
            units += (gl.load(places),)
        else:
            units += (gl.load(places, mask=start + warp + row * 0 + pair * 0 < weight.steps, other=0),)
        scales += (
            load_factors(
                weight.scales + factor,
                weight.steps,
                weight.groups,
                start,
                SHAPE.group_steps != 0,
                SHAPE,
                ROWS,
                WARPS,
                SUMS,
            ),
        )
        zeros += (
            load_factors(
                weight.zeros + factor, weight.steps, weight.groups, start, SHAPE.has_zeros, SHAPE, ROWS, WARPS, LEFT
            ),
        )
    return units, scales, zeros


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_round(
    total: gl.tensor,
    fetched: gl.tuple,
    inputs: gl.tuple,
    first_step: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_WARPS: gl.constexpr,
    STEPS: gl.constexpr,
) -> gl.tensor:
    """`total`, [WARPS, ROWS, TOKENS], and the products of a round; scaled unless the weight has one group."""
    SUMS: gl.constexpr = sums_layout(WARPS, ROW_WARPS)
    LOADED: gl.constexpr = inputs_layout(WARPS, ROW_WARPS, TOKENS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUMS, k_width=2)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LOADED)))[:, None][:, :, None]
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LOADED)))[None, :][:, :, None]
    unit = gl.arange(0, UNITS, layout=gl.SliceLayout(0, gl.SliceLayout(1, LOADED)))[None, :][:, None, :]
    units, scales, zeros = fetched
    # Tokens beyond the last one repeat it; their outputs are not stored.
    places = (warp * SHAPE.step + unit) * inputs.step + gl.minimum(token, inputs.tokens - 1) * inputs.stride
    PARTS: gl.constexpr = SHAPE.parts
    for index in gl.static_range(STEPS):
        parts = unit_operands(units[index], zeros[index], inputs.x.dtype.element_ty, SHAPE, ROWS, WARPS, ROW_WARPS)
        sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
        for part in gl.static_range(PARTS):
            start = (first_step + index * WARPS) * SHAPE.step + part * UNITS
            if SHAPE.even:
                numbers = gl.load(inputs.x + start * inputs.step + places)
            else:
                known = start + warp * SHAPE.step + unit + token * 0 < inputs.columns
                numbers = gl.load(inputs.x + start * inputs.step + places, mask=known, other=0.0)
            right = gl.convert_layout(gl.permute(interleaved(numbers, TOKENS, WARPS), (0, 2, 1)), RIGHT)
            sums = mma_v2(parts[part], right, sums)
            if SHAPE.group_steps != 0 and (part + 1) % SHAPE.group_parts == 0:
                total += sums * scales[index][part // SHAPE.group_parts].to(gl.float32)[:, :, None]
                sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
        if SHAPE.group_steps == 0:
            total += sums
    return total


@gluon.jit  # type: ignore[untyped-decorator]
def _ask_for_outputs(
    outs: gl.tuple,
    weight: gl.tuple,
    first: gl.tensor,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    OUT: gl.constexpr,
) -> gl.tuple:
    """The residual of a program's outputs, weights of the norm behind, and scales where the weight has one group."""
    output = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    scales = scales_at(weight, output, outs.outputs, SHAPE, 1)
    return residual_at(outs, output, token), norm_weight_at(outs, output), scales


@gluon.jit  # type: ignore[untyped-decorator]
def _finish(
    sums: gl.tensor,
    factors: gl.tuple,
    asked: gl.tuple,
    outs: gl.tuple,
    first: gl.tensor,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    OUT: gl.constexpr,
) -> None:
    """Write a program's outputs from `first` on, [ROWS, TOKENS]. asked: of `_ask_for_outputs`."""
    output = first + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    residual, norm_weight, scales = asked
    if len(scales) == 1:
        sums *= scales[0][:, None]
    squares = write_outputs((sums,), factors, residual, norm_weight, outs, output, token)
    if outs.behind is not None:
        leave_squares(squares, outs, token, gl.program_id(0), gl.num_programs(0))


@gluon.jit  # type: ignore[untyped-decorator]
def _join_splits(
    sums: gl.tensor,
    partial: gl.tensor,
    counter: gl.tensor,
    splits: gl.tensor,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    OUT: gl.constexpr,
) -> gl.tuple:
    """Leave a program's sums. The sums of all, and whether this program has them: the last one to come takes the
    counter back."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    place = row[:, None] + token[None, :] * ROWS
    parts = partial + gl.program_id(0).to(gl.int64) * splits * (ROWS * TOKENS)
    gl.store(parts + gl.program_id(1) * (ROWS * TOKENS) + place, sums)
    # Every thread's share is stored before one of them says so.
    gl.thread_barrier()
    last = gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        sums = gl.load(parts + place, cache_modifier=".cg")
        for other in range(1, splits):
            sums += gl.load(parts + other * (ROWS * TOKENS) + place, cache_modifier=".cg")
        gl.store(counter, 0)
    return sums, last
