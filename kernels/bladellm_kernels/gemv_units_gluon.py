"""The linear layer of a `UnitWeight` for a few tokens: codes go from memory straight into tensor-core registers.

The warps of a program share ROWS outputs and take turns along K, so nothing is exchanged before one sum at the end and
no program waits for another. In Gluon, Triton's language with explicit layouts: a thread's 16 bytes of codes and the 16
bytes of x beside them hold the same inputs, and a product of matrices does not mind in which order its inputs come, so
both are operands as they were loaded, without shared memory. What a round multiplies was asked for one round before,
the first round before the kernel's inputs are ready.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.weight_units_triton import BYTES_BF16, BYTES_FP16, NIBBLES_BF16, NIBBLES_FP16

TILE_ROWS = gl.constexpr(64)
UNITS = gl.constexpr(32)
STEP_PAIRS = gl.constexpr(64 * 16)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def sums_layout(warps: int, row_warps: int) -> gl.NVMMADistributedLayout:
    """Of sums [warps along K, rows, tokens]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, row_warps, 1], [1, 16, 8])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def codes_layout(warps: int, row_warps: int, rows: int) -> gl.DistributedLinearLayout:
    """Of pairs of units [warps along K, rows, 16] on the way from memory: four of a row a thread, the rows of products
    beside each other one after another."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0], *_doublings(16 * row_warps, rows, 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    in_warps = _doublings(16, 16 * row_warps, 1) + _doublings(1, warps, 0)
    return gl.DistributedLinearLayout(registers, lanes, in_warps, [], [warps, rows, 16])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def inputs_layout(warps: int, row_warps: int, tokens: int) -> gl.DistributedLinearLayout:
    """Of a part of x, [warps along K, tokens, 32], likewise; row_warps load the same."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *_doublings(8, tokens, 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    in_warps = [[0, 0, 0]] * (row_warps.bit_length() - 1) + _doublings(1, warps, 0)
    return gl.DistributedLinearLayout(registers, lanes, in_warps, [], [warps, tokens, 32])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def outputs_layout(warps: int, tokens: int) -> gl.BlockedLayout:
    """Of [rows, tokens] on the way to memory, where rows lie side by side."""
    across = min(warps, tokens)
    return gl.BlockedLayout([1, 1], [32, 1], [warps // across, across], [0, 1])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _doublings(first: int, end: int, dimension: int) -> list[list[int]]:
    found = []
    while first < end:
        found.append([first if index == dimension else 0 for index in range(3)])
        first *= 2
    return found


@gluon.jit(do_not_specialize=["tokens", "splits", "share"])  # type: ignore[untyped-decorator]
def gemv_units_kernel(
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
    HAS_BIAS: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """Program (i, j) adds up steps [share j, share (j + 1)) of K for outputs [ROWS i, ROWS (i + 1)) of all tokens.

    WARPS along K by ROW_WARPS along the outputs; a round is STEPS steps of each warp, a share whole rounds, ONE_ROUND:
    not more than one. x: [tokens, columns], y: [tokens, rows]. partial: float32 [programs, TOKENS, ROWS] and arrived:
    int32, zeros, one of each i, where K is split.
    """
    SUMS: gl.constexpr = sums_layout(WARPS, ROW_WARPS)
    let_next_start(EARLY)
    first = gl.program_id(0) * ROWS
    # Tiles come in pairs, so that 128 rows may always be read.
    tile = (first // TILE_ROWS).to(gl.int64)
    codes = weight.codes + tile * weight.steps * STEP_PAIRS + first % TILE_ROWS * (UNITS // 2)
    factor = tile * weight.groups * TILE_ROWS + first % TILE_ROWS
    step = 0
    if SPLIT:
        step = gl.program_id(1) * share
    units, scales, zeros = _fetch_round(weight, codes, factor, step, SHAPE, ROWS, WARPS, ROW_WARPS, STEPS)
    wait_for_inputs(EARLY)
    total = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
    if not ONE_ROUND:
        ROUND: gl.constexpr = WARPS * STEPS
        for _round in range((gl.minimum(share, weight.steps - step) - 1) // ROUND):
            after = _fetch_round(weight, codes, factor, step + ROUND, SHAPE, ROWS, WARPS, ROW_WARPS, STEPS)
            total = _multiply_round(
                total, units, scales, zeros, x, step, x_stride, x_step, tokens, columns, SHAPE, ROWS, TOKENS, WARPS,
                ROW_WARPS, STEPS,
            )  # fmt: skip
            units, scales, zeros = after
            step += ROUND
    total = _multiply_round(
        total, units, scales, zeros, x, step, x_stride, x_step, tokens, columns, SHAPE, ROWS, TOKENS, WARPS,
        ROW_WARPS, STEPS,
    )  # fmt: skip
    OUT: gl.constexpr = outputs_layout(WARPS * ROW_WARPS, TOKENS)
    out = gl.convert_layout(gl.sum(total, 0), OUT)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    token = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, OUT))
    factors = weight.scales + factor
    if not SPLIT:
        _finish(out, factors, bias, y, first, row, token, y_stride, tokens, rows, SHAPE, HAS_BIAS)
    else:
        place = row[:, None] + token[None, :] * ROWS
        parts = partial + gl.program_id(0).to(gl.int64) * splits * (ROWS * TOKENS)
        gl.store(parts + gl.program_id(1) * (ROWS * TOKENS) + place, out)
        # Every thread's share is stored before one of them says so.
        gl.thread_barrier()
        if gl.atomic_add(arrived + gl.program_id(0), 1, sem="acq_rel", scope="gpu") == splits - 1:
            out = gl.load(parts + place, cache_modifier=".cg")
            for other in range(1, splits):
                out += gl.load(parts + other * (ROWS * TOKENS) + place, cache_modifier=".cg")
            _finish(out, factors, bias, y, first, row, token, y_stride, tokens, rows, SHAPE, HAS_BIAS)
            gl.store(arrived + gl.program_id(0), 0)


@gluon.jit  # type: ignore[untyped-decorator]
def _finish(
    out: gl.tensor,
    factors: gl.tensor,
    bias: gl.tensor,
    y: gl.tensor,
    first: gl.tensor,
    row: gl.tensor,
    token: gl.tensor,
    y_stride: gl.tensor,
    tokens: gl.tensor,
    rows: gl.tensor,
    SHAPE: gl.constexpr,
    HAS_BIAS: gl.constexpr,
) -> None:
    number = first + row
    if SHAPE.group_steps == 0:
        # One group: scales lie in the order of the rows.
        out *= gl.load(factors + row).to(gl.float32)[:, None]
    if HAS_BIAS:
        out += gl.load(bias + number, mask=number < rows, other=0.0).to(gl.float32)[:, None]
    place = y + token.to(gl.int64)[None, :] * y_stride + number[:, None]
    gl.store(place, out.to(y.dtype.element_ty), mask=(token < tokens)[None, :] & (number < rows)[:, None])


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
def load_factors(
    factors: gl.tensor,
    steps: gl.tensor,
    groups: gl.tensor,
    start: gl.tensor,
    USED: gl.constexpr,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    OPERAND: gl.constexpr,
) -> gl.tuple:
    """Of each group of the warps' steps from `start` on, [warps, ROWS] beside the operand; USED: whether there are."""
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :]
    if ROWS > TILE_ROWS:
        row = row // TILE_ROWS * (groups * TILE_ROWS) + row % TILE_ROWS
    step = start + warp if SHAPE.even else gl.minimum(start + warp, steps - 1)
    found: gl.tuple = ()
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    for group in gl.static_range(GROUPS):
        if not USED:
            found += (0,)
        elif SHAPE.group_steps > 0:
            found += (gl.load(factors + (step // SHAPE.group_steps * TILE_ROWS + row)),)
        elif SHAPE.group_steps < 0:
            found += (gl.load(factors + ((step * GROUPS + group) * TILE_ROWS + row)),)
        else:
            found += (gl.load(factors + (step * 0 + row)),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _multiply_round(
    total: gl.tensor,
    units: gl.tuple,
    scales: gl.tuple,
    zeros: gl.tuple,
    x: gl.tensor,
    first_step: gl.tensor,
    x_stride: gl.tensor,
    x_step: gl.tensor,
    tokens: gl.tensor,
    columns: gl.tensor,
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
    # Tokens beyond the last one repeat it; their outputs are not stored.
    places = (warp * SHAPE.step + unit) * x_step + gl.minimum(token, tokens - 1) * x_stride
    PARTS: gl.constexpr = SHAPE.parts
    for index in gl.static_range(STEPS):
        parts = unit_operands(units[index], zeros[index], x.dtype.element_ty, SHAPE, ROWS, WARPS, ROW_WARPS)
        sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
        for part in gl.static_range(PARTS):
            start = (first_step + index * WARPS) * SHAPE.step + part * UNITS
            if SHAPE.even:
                numbers = gl.load(x + start * x_step + places)
            else:
                known = start + warp * SHAPE.step + unit + token * 0 < columns
                numbers = gl.load(x + start * x_step + places, mask=known, other=0.0)
            right = gl.convert_layout(gl.permute(interleaved(numbers, TOKENS, WARPS), (0, 2, 1)), RIGHT)
            sums = mma_v2(parts[part], right, sums)
            if SHAPE.group_steps != 0 and (part + 1) % SHAPE.group_parts == 0:
                total += sums * scales[index][part // SHAPE.group_parts].to(gl.float32)[:, :, None]
                sums = gl.zeros([WARPS, ROWS, TOKENS], gl.float32, SUMS)
        if SHAPE.group_steps == 0:
            total += sums
    return total


@gluon.jit  # type: ignore[untyped-decorator]
def interleaved(numbers: gl.tensor, ROWS: gl.constexpr, WARPS: gl.constexpr) -> gl.tensor:
    """[WARPS, ROWS, 32] with input 8 i + 2 j + k as number 8 j + 2 i + k: a thread's eight are where the operands of a
    product have them."""
    split = gl.permute(gl.reshape(numbers, [WARPS, ROWS, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.reshape(split, [WARPS, ROWS, 32])


@gluon.jit  # type: ignore[untyped-decorator]
def unit_operands(
    pairs: gl.tensor,
    zeros: gl.tuple,
    dtype: gl.constexpr,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_WARPS: gl.constexpr,
) -> gl.tuple:
    """The parts of pairs of units, `code - zero` each, as left operands; see `weight_units_triton.unit_parts`."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(WARPS, ROW_WARPS), k_width=2)
    # Pairs stay whole until here: numbers of 16 bits that live through a loop are taken apart and put together.
    units = gl.reshape(gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)), [WARPS, ROWS, UNITS])
    units = gl.convert_layout(interleaved(units, ROWS, WARPS), LEFT)
    if SHAPE.plain:
        parts = _plain_parts(units, zeros, dtype, SHAPE)
    elif SHAPE.bits == 4 and dtype == gl.bfloat16:
        parts = gl.inline_asm_elementwise(
            NIBBLES_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r", _with_offsets(units, zeros, 0x4300, SHAPE),
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif SHAPE.bits == 4:
        parts = gl.inline_asm_elementwise(
            NIBBLES_FP16, "=&r,=&r,=&r,=&r,r,r,r,r,r", _with_offsets(units, zeros, 0x6400, SHAPE),
            (gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif dtype == gl.bfloat16:
        parts = gl.inline_asm_elementwise(
            BYTES_BF16, "=&r,=&r,r", [units], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        parts = gl.inline_asm_elementwise(
            BYTES_FP16, "=&r,=&r,r", [units], (gl.float16, gl.float16), is_pure=True, pack=2
        )
    return parts


@gluon.jit  # type: ignore[untyped-decorator]
def _with_offsets(units: gl.tensor, zeros: gl.tuple, ONE: gl.constexpr, SHAPE: gl.constexpr) -> gl.tuple:
    """The units, and zero points in the low mantissa bits, like the codes."""
    found: gl.tuple = (units,)
    for part in gl.static_range(4):
        if SHAPE.has_zeros:
            zero = (zeros[part // SHAPE.group_parts].to(gl.int16) | ONE).to(gl.int16)
            found += (zero[:, :, None] + (units & 0),)
        else:
            found += (gl.full(units.shape, 8 | ONE, gl.int16, layout=units.type.layout),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _plain_parts(units: gl.tensor, zeros: gl.tuple, dtype: gl.constexpr, SHAPE: gl.constexpr) -> gl.tuple:
    bits = units.to(gl.int32)
    found: gl.tuple = ()
    PARTS: gl.constexpr = SHAPE.parts
    for part in gl.static_range(PARTS):
        code = (bits >> SHAPE.bits * part) & (2**SHAPE.bits - 1)
        if SHAPE.has_zeros:
            found += ((code - zeros[part // SHAPE.group_parts].to(gl.int32)[:, :, None]).to(dtype),)
        else:
            found += ((code - 2 ** (SHAPE.bits - 1)).to(dtype),)
    return found
