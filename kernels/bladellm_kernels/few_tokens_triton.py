"""The linear layer of a `UnitWeight` for at most 8 tokens: the warps of a program take turns along K.

The weight is the left operand of the tensor cores, tokens are columns of the right one. Each warp multiplies its own
steps of the same rows, a batch of the products, and warps meet once, at the end: no split of K leaves the program.
"""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.weight_units_triton import (
    STEP_BLOCK,
    TILE_ROWS,
    UNITS,
    part_zeros,
    prefetch_lines,
    step_factors,
    unit_parts,
)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def few_tokens_kernel(
    x: tl.tensor,
    weight: tl.tuple,
    bias: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    x_step: tl.tensor,
    y_stride: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program i computes outputs [ROWS i, ROWS (i + 1)) of all tokens. x: [tokens, columns], y: [tokens, rows]."""
    let_next_start(EARLY)
    first = tl.program_id(0) * ROWS
    tile = (first // TILE_ROWS).to(tl.int64)
    codes = weight.codes + tile * weight.steps * STEP_BLOCK + first % TILE_ROWS * UNITS
    if EARLY and PREFETCH > 0:
        _prefetch(codes, weight.steps, ROWS, PREFETCH)
    wait_for_inputs(EARLY)
    factor = tile * weight.groups * TILE_ROWS + first % TILE_ROWS
    token = tl.arange(0, TOKENS)
    total = _product(x, weight, codes, factor, token, x_stride, x_step, tokens, columns, SHAPE, ROWS, WARPS, STAGES)
    row = tl.arange(0, ROWS)
    out = tl.sum(total, 0)
    if SHAPE.group_steps == 0:
        out *= tl.load(weight.scales + factor + row).to(tl.float32)[:, None]
    number = first + row
    if HAS_BIAS:
        out += tl.load(bias + number, mask=number < rows, other=0.0).to(tl.float32)[:, None]
    place = y + token.to(tl.int64)[None, :] * y_stride + number[:, None]
    tl.store(place, out.to(y.dtype.element_ty), mask=(token < tokens)[None, :] & (number < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    x: tl.tensor,
    weight: tl.tuple,
    codes: tl.tensor,
    factor: tl.tensor,
    token: tl.tensor,
    x_stride: tl.tensor,
    x_step: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """The sums of each warp, float32 [WARPS, ROWS, TOKENS], scaled unless the weight has one group.

    codes: pointer to the program's first row; factor: where its scales and zero points begin.
    """
    warp, row, unit = tl.arange(0, WARPS), tl.arange(0, ROWS), tl.arange(0, UNITS)
    unit_places = warp[:, None, None] * STEP_BLOCK + row[None, :, None] * UNITS + unit[None, None, :]
    x_places = (warp[:, None, None] * SHAPE.step + unit[None, :, None]) * x_step + token[None, None, :] * x_stride
    scale_rows = weight.scales + factor + row[None, :]
    zero_rows = weight.zeros + factor + row[None, :]
    last = weight.steps - 1
    step = tl.minimum(warp[:, None], last)
    scales = step_factors(scale_rows, step, SHAPE.group_steps != 0, SHAPE)
    zeros = step_factors(zero_rows, step, SHAPE.has_zeros, SHAPE)
    total = tl.full((WARPS, ROWS, token.shape[0]), 0.0, tl.float32)
    PARTS: tl.constexpr = SHAPE.parts
    for round in tl.range(0, weight.steps, WARPS, num_stages=STAGES):
        # Asked for one round ahead: the pipeline copies codes and inputs only.
        step = tl.minimum(round + WARPS + warp[:, None], last)
        next_scales = step_factors(scale_rows, step, SHAPE.group_steps != 0, SHAPE)
        next_zeros = step_factors(zero_rows, step, SHAPE.has_zeros, SHAPE)
        block = round if SHAPE.even else tl.minimum(round + warp, last)[:, None, None] - warp[:, None, None]
        units = tl.load(codes + block * STEP_BLOCK + unit_places)
        parts = unit_parts(units, part_zeros(zeros, units, SHAPE), x.dtype.element_ty, SHAPE)
        sums = total if SHAPE.group_steps == 0 else tl.full((WARPS, ROWS, token.shape[0]), 0.0, tl.float32)
        for part in tl.static_range(PARTS):
            start = round * SHAPE.step + part * UNITS
            known = (token < tokens)[None, None, :]
            if not SHAPE.even:
                known &= (start + warp[:, None] * SHAPE.step + unit[None, :] < columns)[:, :, None]
            numbers = tl.load(x + start * x_step + x_places, mask=known, other=0.0)
            sums = tl.dot(parts[part], numbers, sums, input_precision="ieee")
            if SHAPE.group_steps != 0 and (part + 1) % SHAPE.group_parts == 0:
                total += sums * scales[part // SHAPE.group_parts].to(tl.float32)[:, :, None]
                sums = tl.full((WARPS, ROWS, token.shape[0]), 0.0, tl.float32)
        if SHAPE.group_steps == 0:
            total = sums
        scales, zeros = next_scales, next_zeros
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(codes: tl.tensor, steps: tl.tensor, ROWS: tl.constexpr, LINES: tl.constexpr) -> None:
    """The first LINES lines of 128 bytes that a program will read: weights wait for no kernel."""
    line = tl.arange(0, LINES)
    step = tl.minimum(line // (ROWS // 2), steps - 1)
    prefetch_lines(codes + step * STEP_BLOCK + line % (ROWS // 2) * 64)
