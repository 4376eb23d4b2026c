"""Write a `UnitWeight` out as plain numbers, for products with many tokens."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.weight_units_triton import STEP_BLOCK, TILE_ROWS, UNITS, part_zeros, step_factors, unit_parts


@triton.jit  # type: ignore[untyped-decorator]
def dequantize_units_kernel(
    weight: tl.tuple,
    out: tl.tensor,
    first_tile: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    SHAPE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (i, t): step t of 64 rows from tile `first_tile` + i on. out: [rows, columns], contiguous."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    tile = (first_tile + tl.program_id(0)).to(tl.int64)
    step = tl.program_id(1)
    row, unit = tl.arange(0, TILE_ROWS), tl.arange(0, UNITS)
    units = tl.load(weight.codes + (tile * weight.steps + step) * STEP_BLOCK + row[:, None] * UNITS + unit[None, :])
    factor = tile * weight.groups * TILE_ROWS + row
    zeros = step_factors(weight.zeros + factor, step, SHAPE.has_zeros, SHAPE)
    scales = step_factors(weight.scales + factor, step, True, SHAPE)
    parts = unit_parts(units, part_zeros(zeros, units, SHAPE), out.dtype.element_ty, SHAPE)
    number = tl.program_id(0) * TILE_ROWS + row
    PARTS: tl.constexpr = SHAPE.parts
    for part in tl.static_range(PARTS):
        values = parts[part].to(tl.float32) * scales[part // SHAPE.group_parts].to(tl.float32)[:, None]
        column = step * SHAPE.step + part * UNITS + unit
        inside = (number < rows)[:, None] & (column < columns)[None, :]
        place = out + number.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, values.to(out.dtype.element_ty), mask=inside)
