"""The start of a segment of decode attention: what is known of its sequence, and the sequence's queries."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from bladellm_kernels.decode_kv_triton import Span
from bladellm_kernels.kv_codes_triton import part_number

LOG2E = tl.constexpr(1.4426950408889634)


class RowArguments(NamedTuple):
    """Queries or outputs, [tokens, heads, head_dim] with contiguous heads: strides in elements."""

    rows: Any
    token_stride: Any
    head_stride: Any


class PlanArguments(NamedTuple):
    """The sequences of a step: fields of each (`DecodeWork.sequences`), where its KV is, and `DecodeWork.shares`."""

    sequences: Any
    base_rows: Any
    slots: Any
    kv_lens: Any
    shares: Any


@triton.jit  # type: ignore[untyped-decorator]
def load_sequence(
    plan: tl.tuple, sequence: tl.tensor, known: tl.tensor, head: tl.tensor, window: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """First and end of a sequence's blocks in the count over the batch, and where to read it; asked for at once.

    Empty where it is not known that there is such a sequence.
    """
    first = tl.load(plan.sequences + sequence * 5, mask=known, other=0)
    last = tl.load(plan.sequences + sequence * 5 + 1, mask=known, other=0)
    kv_len = tl.load(plan.kv_lens + sequence, mask=known, other=0).to(tl.int32)
    slot = tl.load(plan.slots + sequence, mask=known, other=0)
    base_row = tl.load(plan.base_rows + sequence, mask=known, other=0)
    lowest = kv_len * 0
    if SHAPE.windowed:
        lowest = tl.maximum(kv_len - SHAPE.query_len + 1 - window, 0)
    if SHAPE.reads == "own":
        lowest = tl.load(plan.shares + sequence, mask=known, other=0).to(tl.int32)
    return first, last, Span(slot, base_row, lowest, kv_len, head)


@triton.jit  # type: ignore[untyped-decorator]
def first_granule(kv: tl.tuple, span: tl.tuple, position: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """`block_granule` of the block at `position`, or anything where the span is empty."""
    granule = position
    if SHAPE.one_granule and (SHAPE.scaled or SHAPE.paged):
        table = kv.table + span.slot * kv.table_stride
        granule = tl.load(table + position // SHAPE.granule_tokens, mask=span.kv_len > 0, other=0)
    return granule


@triton.jit  # type: ignore[untyped-decorator]
def load_queries(
    q: tl.tuple,
    plan: tl.tuple,
    sequence: tl.tensor,
    known: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """The parts of a sequence's queries, [units_padded, rows] each; zero where it is not known that there are any."""
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = q.rows + token * q.token_stride + (head * SHAPE.group + row % SHAPE.group) * q.head_stride
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :] & known
    if SHAPE.reads == "shared":
        used = (row < SHAPE.rows_used) & known
        token = tl.load(plan.shares + sequence * SHAPE.query_len + row // SHAPE.group, mask=used, other=-1)
        place = q.rows + token * q.token_stride + (head * SHAPE.group + row % SHAPE.group) * q.head_stride
        inside &= (token >= 0)[None, :]
    parts: tl.tuple = ()
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        parts += (tl.load(place[None, :] + number[:, None], mask=inside, other=0.0),)
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def turn_queries(parts: tl.tuple, scale: tl.tensor, SHAPE: tl.constexpr) -> tl.tuple:
    """The parts of the queries [warps, units_padded, rows], their sum over the head [rows], and the factor of scores.

    Against quantized memory 16-bit queries become float16, with the largest between 1 and 2, or stay bfloat16 and are
    raised by `DecodeShape.queries_raised`.
    """
    PARTS: tl.constexpr = SHAPE.parts
    factor = scale * LOG2E
    shrink: tl.tensor = 1.0
    if SHAPE.scaled and parts[0].dtype != tl.float32:
        highest = tl.abs(parts[0].to(tl.float32))
        for part in tl.static_range(1, PARTS):
            highest = tl.maximum(highest, tl.abs(parts[part].to(tl.float32)))
        # 2^e with 2^e <= largest < 2^(e + 1), and 2^-e, from the exponent's bits.
        exponent = tl.max(highest).to(tl.int32, bitcast=True) & 0x7F800000
        factor *= exponent.to(tl.float32, bitcast=True)
        shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True) * SHAPE.query_factor
    TYPE: tl.constexpr = parts[0].dtype if SHAPE.queries_raised > 0 else tl.float16
    sums = tl.full((SHAPE.units_padded, SHAPE.rows), 0.0, tl.float32)
    turned: tl.tuple = ()
    for part in tl.static_range(PARTS):
        numbers = parts[part]
        if SHAPE.scaled and parts[0].dtype != tl.float32:
            numbers = (numbers.to(tl.float32) * shrink).to(TYPE)
        sums += numbers.to(tl.float32)
        if SHAPE.nibbles and part % 2 == 0:
            # As upper nibbles count.
            numbers *= 16
        turned += (tl.broadcast_to(numbers[None], (SHAPE.warps, SHAPE.units_padded, SHAPE.rows)),)
    return turned, tl.sum(sums, 0), factor
