"""The linear layer of 8-bit codes on both sides, int8 or float8_e4m3fn: two kernels.

The first rounds the rows of x, the second multiplies codes on the tensor cores, the weight as left operand, and scales
the sums. K is split among programs; the last one of a tile adds up the sums of all in their order.
"""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.weight_units_triton import prefetch_lines

_TINY = tl.constexpr(1.1754943508222875e-38)
_ROUND = tl.constexpr(12582912.0)
"""1.5 · 2^23: floats near it are whole numbers, so adding it rounds, halves to even."""


@triton.jit  # type: ignore[untyped-decorator]
def round_rows_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    steps: tl.tensor,
    sums: tl.tensor,
    arrived: tl.tensor,
    x_stride: tl.tensor,
    x_step: tl.tensor,
    columns: tl.tensor,
    width: tl.tensor,
    tiles: tl.tensor,
    static: tl.tensor,
    LARGEST: tl.constexpr,
    STATIC: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program t rounds row t of x: codes [T, width], zeros from `columns` on, their scale and their sum.

    The scale is static, or the largest magnitude / LARGEST; NaN where a quotient is. Program 0 sets arrived[:tiles] to
    0.
    """
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    if token == 0:
        for first in tl.range(0, tiles, BLOCK):
            place = first + tl.arange(0, BLOCK)
            tl.store(arrived + place, tl.zeros((BLOCK,), tl.int32), mask=place < tiles)
    peak = tl.zeros((BLOCK,), tl.float32)
    if not STATIC:
        for first in tl.range(0, columns, BLOCK):
            column = first + tl.arange(0, BLOCK)
            numbers = tl.load(x + token * x_stride + column * x_step, mask=column < columns, other=0.0)
            peak = tl.maximum(peak, tl.abs(numbers.to(tl.float32)))
    step = static
    if not STATIC:
        step = tl.maximum(tl.div_rn(tl.max(peak, 0), LARGEST), _TINY)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        numbers = tl.load(x + token * x_stride + column * x_step, mask=column < columns, other=0.0).to(tl.float32)
        quotients = tl.div_rn(numbers, tl.zeros((BLOCK,), tl.float32) + step)
        if codes.dtype.element_ty == tl.int8:
            quotients = tl.clamp(quotients, -128.0, 127.0, propagate_nan=tl.PropagateNan.ALL)
            quotients = (quotients + _ROUND) - _ROUND
        else:
            quotients = tl.clamp(quotients, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
        total += quotients
        tl.store(codes + token * width + column, quotients.to(codes.dtype.element_ty), mask=column < width)
    whole = tl.sum(total, 0)
    # Neither a maximum nor integer codes keep NaN, but its row must be NaN.
    tl.store(steps + token, tl.where(whole == whole, step, whole))
    tl.store(sums + token, whole)


@triton.jit(do_not_specialize=["tokens", "splits"])  # type: ignore[untyped-decorator]
def code_product_kernel(
    codes: tl.tensor,
    weight: tl.tensor,
    steps: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    weight_stride: tl.tensor,
    y_stride: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    splits: tl.tensor,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    HAS_SHIFTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (i, j): range i % splits of K, ROWS outputs from i // splits · ROWS, TOKENS tokens from j · TOKENS.

    codes: [tokens, width]; weight: [rows, width]; y = steps · (scales · codes @ weightᵀ + sums · shifts) + bias.
    """
    let_next_start(EARLY)
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits
    row = tile * ROWS + tl.arange(0, ROWS)
    weight_rows = weight + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * weight_stride
    share = tl.cdiv(tl.cdiv(width, BLOCK), splits) * BLOCK
    begin, end = split * share, tl.minimum(split * share + share, width)
    if EARLY:
        prefetch_lines(weight_rows + tl.minimum(begin + 128 * tl.arange(0, 4)[None, :], end - 1))
    wait_for_inputs(EARLY)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = _sums(codes, weight_rows, token, begin, end, tokens, width, BLOCK, STAGES, EVEN)
    last = True
    if SPLIT:
        tile += tl.program_id(1) * (tl.num_programs(0) // splits)
        place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        parts = partial + tile.to(tl.int64) * (splits * ROWS * TOKENS)
        tl.store(parts + split * (ROWS * TOKENS) + place, total)
        # Every thread's share is stored before one of them says so.
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == splits - 1
    if last:
        if SPLIT:
            total = tl.load(parts + place, cache_modifier=".cg")
            for other in tl.range(1, splits):
                total += tl.load(parts + other * (ROWS * TOKENS) + place, cache_modifier=".cg")
        _finish(total, steps, sums, scales, shifts, bias, y, row, token, y_stride, tokens, rows, HAS_SHIFTS, HAS_BIAS)


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    total: tl.tensor,
    steps: tl.tensor,
    sums: tl.tensor,
    scales: tl.tensor,
    shifts: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    row: tl.tensor,
    token: tl.tensor,
    y_stride: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    HAS_SHIFTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    """Scale the sums of codes and store them."""
    known, inside = token < tokens, row < rows
    values = total.to(tl.float32) * tl.load(scales + row, mask=inside, other=0.0)[:, None]
    if HAS_SHIFTS:
        shift = tl.load(shifts + row, mask=inside, other=0.0)
        values += shift[:, None] * tl.load(sums + token, mask=known, other=0.0)[None, :]
    values *= tl.load(steps + token, mask=known, other=0.0)[None, :]
    if HAS_BIAS:
        values += tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)[:, None]
    target = y + token.to(tl.int64)[None, :] * y_stride + row[:, None]
    tl.store(target, values.to(y.dtype.element_ty), mask=inside[:, None] & known[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _sums(
    codes: tl.tensor,
    weight_rows: tl.tensor,
    token: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Products of columns [begin, end): int32, or float32 of float8 codes."""
    INTEGERS: tl.constexpr = codes.dtype.element_ty == tl.int8
    TYPE: tl.constexpr = tl.int32 if INTEGERS else tl.float32
    total = tl.zeros((weight_rows.shape[0], token.shape[0]), TYPE)
    code_rows = codes + token.to(tl.int64)[None, :] * width
    for first in tl.range(begin, end, BLOCK, num_stages=STAGES):
        column = first + tl.arange(0, BLOCK)
        known = (token < tokens)[None, :]
        if EVEN:
            left = tl.load(weight_rows + column[None, :])
        else:
            left = tl.load(weight_rows + column[None, :], mask=(column < width)[None, :], other=0.0)
            known &= (column < width)[:, None]
        right = tl.load(code_rows + column[:, None], mask=known, other=0.0)
        if INTEGERS:
            total = tl.dot(left, right, total, out_dtype=TYPE)
        else:
            # No more than a block is summed in the tensor cores, which keep 14 bits.
            total += tl.dot(left, right)
    return total
