"""The linear layer of a `UnitWeight` for at most 8 tokens: the warps of a program take turns along K.

The weight is the left operand of the tensor cores, tokens are columns of the right one. Each warp multiplies its own
steps of the same rows, a batch of the products, and warps meet once, at the end: no split of K leaves the program.
"""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.weight_units_triton import TILE_ROWS, UNITS, group_of, prefetch_lines, unit_parts

_BLOCK = tl.constexpr(32 * 64)


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
    codes = weight.codes + tile * weight.steps * _BLOCK + first % TILE_ROWS * UNITS
    if EARLY and PREFETCH > 0:
        _prefetch(codes, weight.steps, ROWS, PREFETCH)
    wait_for_inputs(EARLY)
    factor = tile * weight.groups * TILE_ROWS + first % TILE_ROWS
    warp, row, unit, token = tl.arange(0, WARPS), tl.arange(0, ROWS), tl.arange(0, UNITS), tl.arange(0, TOKENS)
    unit_places = warp[:, None, None] * _BLOCK + row[None, :, None] * UNITS + unit[None, None, :]
    x_places = (warp[:, None, None] * SHAPE.step + unit[None, :, None]) * x_step + token[None, None, :] * x_stride
    total = tl.full((WARPS, ROWS, TOKENS), 0.0, tl.float32)
    for round in tl.range(0, weight.steps, WARPS, num_stages=STAGES):
        step = round + warp
        inside = (step < weight.steps)[:, None] | SHAPE.even
        units = _load(codes + round * _BLOCK + unit_places, inside[:, :, None], SHAPE.even)
        zeros = _zeros(weight.zeros + factor, step, row, inside, SHAPE)
        parts = unit_parts(units, zeros, x.dtype.element_ty, SHAPE)
        sums = tl.full((WARPS, ROWS, TOKENS), 0.0, tl.float32)
        for part in tl.static_range(SHAPE.parts):
            start = round * SHAPE.step + part * UNITS
            known = (token < tokens)[None, None, :]
            if not SHAPE.even:
                known &= (start + warp[:, None] * SHAPE.step + unit[None, :] < columns)[:, :, None]
            numbers = tl.load(x + start * x_step + x_places, mask=known, other=0.0)
            sums = tl.dot(parts[part], numbers, sums, input_precision="ieee")
            if SHAPE.group_steps != 0 and (part + 1) % SHAPE.group_parts == 0:
                group = group_of(step, part // SHAPE.group_parts, SHAPE)
                places = group[:, None] * TILE_ROWS + row[None, :]
                scale = _load(weight.scales + factor + places, inside, SHAPE.even)
                total += sums * scale.to(tl.float32)[:, :, None]
                sums = tl.full((WARPS, ROWS, TOKENS), 0.0, tl.float32)
        if SHAPE.group_steps == 0:
            total += sums
    out = tl.sum(total, 0)
    if SHAPE.group_steps == 0:
        out *= tl.load(weight.scales + factor + row).to(tl.float32)[:, None]
    number = first + row
    if HAS_BIAS:
        out += tl.load(bias + number, mask=number < rows, other=0.0).to(tl.float32)[:, None]
    place = y + token.to(tl.int64)[None, :] * y_stride + number[:, None]
    tl.store(place, out.to(y.dtype.element_ty), mask=(token < tokens)[None, :] & (number < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _load(pointers: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    if EVEN:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=0)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(zeros: tl.tensor, step: tl.tensor, row: tl.tensor, inside: tl.tensor, SHAPE: tl.constexpr) -> tl.tuple:
    """The zero points of each part, int32 [WARPS, ROWS, UNITS]."""
    found: tl.tuple = ()
    for part in tl.static_range(4):
        if SHAPE.has_zeros:
            group = group_of(step, part // SHAPE.group_parts, SHAPE)
            zero = _load(zeros + group[:, None] * TILE_ROWS + row[None, :], inside, SHAPE.even).to(tl.int32)
            found += (tl.broadcast_to(zero[:, :, None], (step.shape[0], row.shape[0], UNITS)),)
        else:
            found += (tl.full((step.shape[0], row.shape[0], UNITS), 8, tl.int32),)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(codes: tl.tensor, steps: tl.tensor, ROWS: tl.constexpr, LINES: tl.constexpr) -> None:
    """The first LINES lines of 128 bytes that a program will read: weights wait for no kernel."""
    line = tl.arange(0, LINES)
    step = tl.minimum(line // (ROWS // 2), steps - 1)
    prefetch_lines(codes + step * _BLOCK + line % (ROWS // 2) * 64)
