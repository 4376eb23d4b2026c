"""Load the queries of a sequence inside the decode kernel, ready for products with its keys."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


class RowArguments(NamedTuple):
    """Queries or outputs, [tokens, heads, head_dim] with contiguous heads: strides in elements."""

    rows: Any
    token_stride: Any
    head_stride: Any


@triton.jit  # type: ignore[untyped-decorator]
def load_queries(
    q: tl.tuple,
    sequence: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    wanted: tl.tensor,
    scale: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """The parts of the queries [warps, units_padded, rows], their sum over the head [warps, rows], what products with
    raised keys exceed those with the keys by [warps, rows], and the factor of scores.

    Against quantized memory 16-bit queries become float16, with the largest between 1 and 2. Zeros if not wanted.
    """
    PARTS: tl.constexpr = SHAPE.parts
    parts = _query_parts(q, sequence, head, row, wanted, SHAPE)
    factor = scale * LOG2E
    if SHAPE.scaled and q.rows.dtype.element_ty != tl.float32:
        largest: tl.tensor = 0.0
        for part in tl.static_range(PARTS):
            largest = tl.maximum(largest, tl.max(tl.abs(parts[part].to(tl.float32))))
        # 2^e with 2^e <= largest < 2^(e + 1), and 2^-e, from the exponent's bits.
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        factor *= exponent.to(tl.float32, bitcast=True)
        shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    query_sum = tl.full((SHAPE.warps, SHAPE.rows), 0.0, tl.float32)
    excess = tl.full((SHAPE.warps, SHAPE.rows), 0.0, tl.float32)
    turned: tl.tuple = ()
    for part in tl.static_range(PARTS):
        numbers = parts[part]
        if SHAPE.scaled and q.rows.dtype.element_ty != tl.float32:
            numbers = (numbers.to(tl.float32) * (shrink * SHAPE.factors[part])).to(tl.float16)
        numbers = tl.permute(tl.broadcast_to(numbers, (SHAPE.warps, SHAPE.rows, SHAPE.units_padded)), (0, 2, 1))
        if SHAPE.affine or SHAPE.excesses[part] != 0:
            # Summed by a product, which leaves the sums where scores will be.
            ones = tl.full((SHAPE.warps, 16, SHAPE.units_padded), 1.0, numbers.dtype)
            sums = tl.max(tl.dot(ones, numbers, input_precision="ieee"), 1) / SHAPE.factors[part]
            query_sum += sums
            excess += sums * SHAPE.excesses[part]
        turned += (numbers,)
    return turned, query_sum, excess, factor


@triton.jit  # type: ignore[untyped-decorator]
def _query_parts(
    q: tl.tuple, sequence: tl.tensor, head: tl.tensor, row: tl.tensor, wanted: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Parts [1, rows, units_padded], loaded as neighbours and then told apart; see `part_number`."""
    PARTS: tl.constexpr = SHAPE.parts
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = q.rows + token * q.token_stride + (head * SHAPE.group + row % SHAPE.group) * q.head_stride
    seen = (row < SHAPE.rows_used)[None, :, None] & wanted
    if PARTS == 1:
        number = tl.arange(0, SHAPE.units_padded)[None, None, :]
        parts: tl.tuple = (tl.load(place[None, :, None] + number, mask=seen & (number < SHAPE.head_dim), other=0.0),)
    else:
        HALF: tl.constexpr = 2 * SHAPE.units
        number = tl.arange(0, 2 * SHAPE.units_padded)[None, None, :]
        inside = seen & (number < HALF)
        low = tl.load(place[None, :, None] + number, mask=inside, other=0.0)
        parts = tl.split(tl.reshape(low, (1, SHAPE.rows, SHAPE.units_padded, 2)))
        if PARTS == 4:
            high = tl.load(place[None, :, None] + HALF + number, mask=inside, other=0.0)
            upper = tl.split(tl.reshape(high, (1, SHAPE.rows, SHAPE.units_padded, 2)))
            parts = (parts[0], upper[0], parts[1], upper[1])
    return parts
