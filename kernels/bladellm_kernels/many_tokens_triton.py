"""The linear layer of a `UnitWeight` for more tokens: tiles of rows and tokens, K split among programs if they are few.

The weight is the left operand of the tensor cores, in registers; tokens are columns of the right one. Of the programs
that share a tile the last one to arrive adds up what all of them left, in their order: the same sum every time.
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


@triton.jit(do_not_specialize=["tokens", "splits"])  # type: ignore[untyped-decorator]
def many_tokens_kernel(
    x: tl.tensor,
    weight: tl.tuple,
    bias: tl.tensor,
    y: tl.tensor,
    partial: tl.tensor,
    arrived: tl.tensor,
    x_stride: tl.tensor,
    x_step: tl.tensor,
    y_stride: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    splits: tl.tensor,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (i, j) adds up range i % splits of K for ROWS outputs from i // splits · ROWS and TOKENS tokens from j ·
    TOKENS. partial: float32 [TOKENS tiles, ROWS tiles, splits, ROWS, TOKENS]; arrived: int32, zeros."""
    let_next_start(EARLY)
    split = tl.program_id(0) % splits
    first = tl.program_id(0) // splits * ROWS
    share = (weight.steps + splits - 1) // splits
    begin, end = split * share, tl.minimum(split * share + share, weight.steps)
    if EARLY and PREFETCH > 0:
        _prefetch(weight, first, begin, end, ROWS, PREFETCH)
    wait_for_inputs(EARLY)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    total = _product(x, weight, first, begin, end, token, x_stride, x_step, tokens, columns, SHAPE, ROWS, STAGES)
    if not SPLIT:
        _finish(total, weight, bias, y, first, token, y_stride, tokens, rows, SHAPE, HAS_BIAS)
    else:
        tile = tl.program_id(1) * (tl.num_programs(0) // splits) + tl.program_id(0) // splits
        place = tl.arange(0, ROWS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        parts = partial + tile.to(tl.int64) * (splits * ROWS * TOKENS)
        tl.store(parts + split * (ROWS * TOKENS) + place, total)
        # Every thread's share is stored before one of them says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == splits - 1:
            total = tl.load(parts + place, cache_modifier=".cg")
            for other in tl.range(1, splits):
                total += tl.load(parts + other * (ROWS * TOKENS) + place, cache_modifier=".cg")
            _finish(total, weight, bias, y, first, token, y_stride, tokens, rows, SHAPE, HAS_BIAS)
            tl.store(arrived + tile, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    x: tl.tensor,
    weight: tl.tuple,
    first: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    token: tl.tensor,
    x_stride: tl.tensor,
    x_step: tl.tensor,
    tokens: tl.tensor,
    columns: tl.tensor,
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
) -> tl.tensor:
    """Steps [begin, end) of rows from `first`, float32 [ROWS, TOKENS], scaled unless the weight has one group.

    Sums begin anew in every round of the loop, so that none is left under way from one to the next: with sums that
    went on, of tiles of 256 rows and 128 tokens, Triton 3.6 compiled a kernel whose results an H200 got wrong.
    """
    row, unit = tl.arange(0, ROWS), tl.arange(0, UNITS)
    # Tiles beyond the last one repeat it; their outputs are not stored.
    tile = tl.minimum((first + row) // TILE_ROWS, weight.tiles - 1)
    unit_rows = weight.codes + tile.to(tl.int64) * weight.steps * STEP_BLOCK + row % TILE_ROWS * UNITS
    factor = tile.to(tl.int64) * weight.groups * TILE_ROWS + row % TILE_ROWS
    scale_rows, zero_rows = weight.scales + factor, weight.zeros + factor
    scales = step_factors(scale_rows, begin, SHAPE.group_steps != 0, SHAPE)
    zeros = step_factors(zero_rows, begin, SHAPE.has_zeros, SHAPE)
    x_places = unit[:, None] * x_step + token.to(tl.int64)[None, :] * x_stride
    total = tl.full((ROWS, token.shape[0]), 0.0, tl.float32)
    PARTS: tl.constexpr = SHAPE.parts
    for step in tl.range(begin, end, num_stages=STAGES):
        # Asked for one step ahead: the pipeline copies codes and inputs only.
        next_step = tl.minimum(step + 1, end - 1)
        next_scales = step_factors(scale_rows, next_step, SHAPE.group_steps != 0, SHAPE)
        next_zeros = step_factors(zero_rows, next_step, SHAPE.has_zeros, SHAPE)
        units = tl.load(unit_rows[:, None] + step * STEP_BLOCK + unit[None, :])
        parts = unit_parts(units, part_zeros(zeros, units, SHAPE), x.dtype.element_ty, SHAPE)
        sums = tl.full((ROWS, token.shape[0]), 0.0, tl.float32)
        for part in tl.static_range(PARTS):
            start = step * SHAPE.step + part * UNITS
            known = (token < tokens)[None, :]
            if not SHAPE.even:
                known &= (start + unit < columns)[:, None]
            numbers = tl.load(x + start * x_step + x_places, mask=known, other=0.0)
            sums = tl.dot(parts[part], numbers, sums, input_precision="ieee")
            if SHAPE.group_steps != 0 and (part + 1) % SHAPE.group_parts == 0:
                total += sums * scales[part // SHAPE.group_parts].to(tl.float32)[:, None]
                sums = tl.full((ROWS, token.shape[0]), 0.0, tl.float32)
        if SHAPE.group_steps == 0:
            total += sums
        scales, zeros = next_scales, next_zeros
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _finish(
    total: tl.tensor,
    weight: tl.tuple,
    bias: tl.tensor,
    y: tl.tensor,
    first: tl.tensor,
    token: tl.tensor,
    y_stride: tl.tensor,
    tokens: tl.tensor,
    rows: tl.tensor,
    SHAPE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
) -> None:
    number = first + tl.arange(0, total.shape[0])
    if SHAPE.group_steps == 0:
        # One group: scales lie in the order of the rows.
        total *= tl.load(weight.scales + number).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + number, mask=number < rows, other=0.0).to(tl.float32)[:, None]
    place = y + token.to(tl.int64)[None, :] * y_stride + number[:, None]
    tl.store(place, total.to(y.dtype.element_ty), mask=(token < tokens)[None, :] & (number < rows)[:, None])


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(
    weight: tl.tuple, first: tl.tensor, begin: tl.tensor, end: tl.tensor, ROWS: tl.constexpr, LINES: tl.constexpr
) -> None:
    """The first LINES lines of 128 bytes that a program will read: weights wait for no kernel."""
    line = tl.arange(0, LINES)
    row = line % (ROWS // 2) * 2
    step = tl.minimum(begin + line // (ROWS // 2), end - 1)
    tile = tl.minimum((first + row) // TILE_ROWS, weight.tiles - 1)
    prefetch_lines(weight.codes + (tile.to(tl.int64) * weight.steps + step) * STEP_BLOCK + row % TILE_ROWS * UNITS)
