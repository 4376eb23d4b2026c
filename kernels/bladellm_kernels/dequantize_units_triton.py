"""Write a `UnitWeight` out as plain numbers, for products with many tokens."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.weight_units_triton import TILE_ROWS, UNITS, group_of, unit_parts

_BLOCK = tl.constexpr(32 * 64)


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
    units = tl.load(weight.codes + (tile * weight.steps + step) * _BLOCK + row[:, None] * UNITS + unit[None, :])
    factor = tile * weight.groups * TILE_ROWS + row
    zeros: tl.tuple = ()
    for part in tl.static_range(4):
        if SHAPE.has_zeros:
            zero = tl.load(weight.zeros + factor + group_of(step, part // SHAPE.group_parts, SHAPE) * TILE_ROWS)
            zeros += (tl.broadcast_to(zero.to(tl.int32)[:, None], (TILE_ROWS, UNITS)),)
        else:
            zeros += (tl.full((TILE_ROWS, UNITS), 8, tl.int32),)
    parts = unit_parts(units, zeros, out.dtype.element_ty, SHAPE)
    number = tl.program_id(0) * TILE_ROWS + row
    for part in tl.static_range(SHAPE.parts):
        scale = tl.load(weight.scales + factor + group_of(step, part // SHAPE.group_parts, SHAPE) * TILE_ROWS)
        values = parts[part].to(tl.float32) * scale.to(tl.float32)[:, None]
        column = step * SHAPE.step + part * UNITS + unit
        inside = (number < rows)[:, None] & (column < columns)[None, :]
        place = out + number.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(place, values.to(out.dtype.element_ty), mask=inside)
