"""The CUDA kernel of `ragged_decode_attention`: equal ranges of KV blocks, whatever the lengths; see `decode_work.py`.

Scores are computed transposed, keys as rows and queries as columns, so that few queries fill a tensor core tile. Each
warp takes its own positions of every block, as one batch of the products, with its own running maximum and sum: warps
exchange nothing until the end of a segment. Scales are folded into scores and probabilities.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.decode_kv_triton import (
    KvArguments,
    Span,
    block_granule,
    block_tokens,
    inside_span,
    load_scales,
    load_units,
)
from bladellm_kernels.decode_shape import decode_shape, unit_strides
from bladellm_kernels.decode_work import DecodeSchedule, DecodeWork
from bladellm_kernels.kv_codes_triton import part_number, separate_values, unit_numbers
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.merge_attention_triton import merge_segments

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: -inf - LOWEST and LOWEST - LOWEST are no NaN."""
LN2 = tl.constexpr(0.6931471805599453)


_REGISTERS = 65536
"""Of an SM."""


class RowArguments(NamedTuple):
    """Queries or outputs, [tokens, heads, head_dim] with contiguous heads: strides in elements."""

    rows: Any
    token_stride: Any
    head_stride: Any


@triton.jit(do_not_specialize_on_alignment=["base_rows", "slots", "kv_lens", "programs", "sequences"])  # type: ignore[untyped-decorator]
def ragged_decode_kernel(
    q: tl.tuple,
    kv: tl.tuple,
    base_rows: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    programs: tl.tensor,
    sequences: tl.tensor,
    out: tl.tuple,
    partial: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Program c · lanes + lane takes range c of the blocks, for one tile of the query rows of one KV head."""
    lane = tl.program_id(0) % (SHAPE.kv_heads * SHAPE.tiles)
    program = tl.program_id(0) // (SHAPE.kv_heads * SHAPE.tiles)
    head = lane // SHAPE.tiles
    row = (lane % SHAPE.tiles) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    block = tl.load(programs + program * 3)
    end = tl.load(programs + program * 3 + 1)
    sequence = tl.load(programs + program * 3 + 2)
    while block < end:
        # All that is known of the sequence is asked for at once: what waits, waits for one of these.
        first = tl.load(sequences + sequence * 5)
        last = tl.load(sequences + sequence * 5 + 1)
        skipped = tl.load(sequences + sequence * 5 + 2) - first
        kv_len = tl.load(kv_lens + sequence).to(tl.int32)
        slot = tl.load(slots + sequence)
        base_row = tl.load(base_rows + sequence)
        stop = tl.minimum(last, end)
        if stop > block:
            lowest = tl.maximum(kv_len - SHAPE.query_len + 1 - window, 0) if SHAPE.windowed else 0
            span = Span(slot, base_row, lowest, kv_len, head)
            queries = _queries(q, sequence, head, row, scale, SHAPE)
            state = _attend(queries, kv, span, row, block + skipped, stop + skipped, window, SHAPE)
            if (block == first) & (stop == last):
                _store_output(state, out, sequence, head, row, SHAPE)
            else:
                _store_partial(state, partial, lse, program + sequence, head, row, SHAPE)
            block = stop
        sequence += 1


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: tl.tuple,
    kv: tl.tuple,
    span: tl.tuple,
    row: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """Blocks [first, stop) of a sequence: normalised outputs by part, [units_padded, rows] each, and the logarithm of
    the sum of exponentials [rows]."""
    PARTS: tl.constexpr = SHAPE.parts
    maximum = tl.full((SHAPE.warps, SHAPE.rows), LOWEST, tl.float32)
    total = tl.full((SHAPE.warps, 8, SHAPE.rows), 0.0, tl.float32)
    shift = tl.full((SHAPE.warps, 8, SHAPE.rows), 0.0, tl.float32)
    outputs: tl.tuple = ()
    for _part in tl.static_range(PARTS):
        outputs += (tl.full((SHAPE.warps, SHAPE.units_padded, SHAPE.rows), 0.0, tl.float32),)
    excess = tl.full((SHAPE.warps, 16, SHAPE.rows), 0.0, tl.float32)
    granule = block_granule(kv, span, first, stop, SHAPE)
    for block in tl.range(first, stop):
        position = block * SHAPE.block_kv
        keys = load_units(kv, span, position, granule, False, SHAPE)
        values = load_units(kv, span, position, granule, True, SHAPE)
        value_scale, value_zero = 0.0, 0.0
        if SHAPE.scaled:
            value_scale = load_scales(kv, span, position, granule, True, 0, SHAPE)
        if SHAPE.affine:
            value_zero = load_scales(kv, span, position, granule, True, 1, SHAPE)
            # Only what a product depends on is loaded ahead.
            value_scale += value_zero * 0
        scores = _scores(keys, queries, kv, span, position, granule, SHAPE)
        scores, value_scale, value_zero = _hide(scores, value_scale, value_zero, span, position, row, window, SHAPE)
        highest = tl.maximum(maximum, tl.max(scores, 1) - SHAPE.raised)
        p = tl.exp2(scores - highest[:, None, :])
        decay = tl.exp2(maximum - highest)
        maximum = highest
        total = total * decay[:, None, :] + _sum_by_lane(p, SHAPE)
        if SHAPE.affine:
            shift = shift * decay[:, None, :] + _sum_by_lane(p * value_zero[:, :, None], SHAPE)
        if SHAPE.scaled:
            p = p * value_scale[:, :, None]
        outputs, excess = _add_values(outputs, excess, decay, values, p.to(queries[0][0].dtype), SHAPE)
        granule = block_granule(kv, span, block + 1, stop, SHAPE)
    total, shift = tl.sum(total, 1), tl.sum(shift, 1)
    if SHAPE.integer:
        outputs = separate_values(outputs, SHAPE.code_step)
    if SHAPE.offset != 0:
        shift -= tl.sum(excess, 1) * (SHAPE.offset / 16)
    return _join_warps(outputs, maximum, total, shift, SHAPE)


@triton.jit  # type: ignore[untyped-decorator]
def _sum_by_lane(numbers: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Sums over every eighth position, [warps, 8, rows]: those that a lane holds itself."""
    return tl.sum(tl.reshape(numbers, (SHAPE.warps, SHAPE.tokens // 8, 8, SHAPE.rows)), 1)


@triton.jit  # type: ignore[untyped-decorator]
def _queries(
    q: tl.tuple, sequence: tl.tensor, head: tl.tensor, row: tl.tensor, scale: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """The parts of the queries [warps, units_padded, rows], their sum over the head [rows], and the factor of scores.

    Against quantized memory 16-bit queries become float16, with the largest between 1 and 2.
    """
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = q.rows + token * q.token_stride + (head * SHAPE.group + row % SHAPE.group) * q.head_stride
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :]
    factor = scale * LOG2E
    largest: tl.tensor = 0.0
    parts: tl.tuple = ()
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        parts += (tl.load(place[None, :] + number[:, None], mask=inside, other=0.0),)
        largest = tl.maximum(largest, tl.max(tl.abs(parts[part].to(tl.float32))))
    query_sum = tl.full((SHAPE.rows,), 0.0, tl.float32)
    if SHAPE.scaled and q.rows.dtype.element_ty != tl.float32:
        # 2^e with 2^e <= largest < 2^(e + 1), and 2^-e, from the exponent's bits.
        exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
        factor *= exponent.to(tl.float32, bitcast=True)
        shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    turned: tl.tuple = ()
    for part in tl.static_range(PARTS):
        numbers = parts[part]
        if SHAPE.scaled and q.rows.dtype.element_ty != tl.float32:
            numbers = (numbers.to(tl.float32) * shrink).to(tl.float16)
        query_sum += tl.sum(numbers.to(tl.float32), 0)
        if PARTS == 4 and part % 2 == 0:
            # As upper nibbles count.
            numbers *= 16
        turned += (tl.broadcast_to(numbers[None], (SHAPE.warps, SHAPE.units_padded, SHAPE.rows)),)
    return turned, query_sum, factor


@triton.jit  # type: ignore[untyped-decorator]
def _scores(
    keys: tl.tensor,
    queries: tl.tuple,
    kv: tl.tuple,
    span: tl.tuple,
    position: tl.tensor,
    granule: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tensor:
    """Scores in powers of two, float32 [warps, tokens, rows]."""
    PARTS: tl.constexpr = SHAPE.parts
    FORMAT: tl.constexpr = SHAPE.format
    PLAIN: tl.constexpr = SHAPE.plain
    STEP: tl.constexpr = SHAPE.code_step * 16 if PARTS == 4 else SHAPE.code_step
    turned, query_sum, factor = queries
    parts = unit_numbers(keys, turned[0].dtype, False, FORMAT, PLAIN)
    scores = tl.full((SHAPE.warps, SHAPE.tokens, SHAPE.rows), 0.0, tl.float32)
    if SHAPE.offset != 0:
        scores += (query_sum * (-SHAPE.offset * STEP))[None, None, :]
    for part in tl.static_range(PARTS):
        scores = tl.dot(parts[part], turned[part], scores, input_precision="ieee")
    if SHAPE.scaled:
        scores *= (load_scales(kv, span, position, granule, False, 0, SHAPE) * (factor / STEP))[:, :, None]
        if SHAPE.affine:
            zero = load_scales(kv, span, position, granule, False, 1, SHAPE)
            scores += zero[:, :, None] * (query_sum * factor)[None, None, :]
    else:
        scores *= factor
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _hide(
    scores: tl.tensor,
    value_scale: tl.tensor,
    value_zero: tl.tensor,
    span: tl.tuple,
    position: tl.tensor,
    row: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """Scores -inf where a row does not see a position, scale and zero 0 outside the span, in blocks that have such
    positions."""
    if (position + SHAPE.block_kv > span.kv_len - SHAPE.query_len + 1) | (position < span.lowest + SHAPE.query_len - 1):
        token = position + block_tokens(SHAPE)
        newest = span.kv_len - SHAPE.query_len + row // SHAPE.group
        visible = token[:, :, None] <= newest[None, None, :]
        if SHAPE.windowed:
            visible &= token[:, :, None] > (newest - window)[None, None, :]
        scores = tl.where(visible, scores, float("-inf"))
        inside = inside_span(block_tokens(SHAPE), position, span, SHAPE)
        if SHAPE.scaled:
            value_scale = tl.where(inside, value_scale, 0.0)
        if SHAPE.affine:
            value_zero = tl.where(inside, value_zero, 0.0)
    return scores, value_scale, value_zero


@triton.jit  # type: ignore[untyped-decorator]
def _add_values(
    outputs: tl.tuple, excess: tl.tensor, decay: tl.tensor, values: tl.tensor, p: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Outputs by part, and in each row of `excess` the sum of p, rounded as it is: what a part of ones would get."""
    PARTS: tl.constexpr = SHAPE.parts
    FORMAT: tl.constexpr = SHAPE.format
    PLAIN: tl.constexpr = SHAPE.plain
    parts = unit_numbers(values, p.dtype, True, FORMAT, PLAIN)
    added: tl.tuple = ()
    for part in tl.static_range(PARTS):
        added += (tl.dot(parts[part], p, outputs[part] * decay[:, None, :], input_precision="ieee"),)
    if SHAPE.offset != 0:
        ones = tl.full((SHAPE.warps, 16, SHAPE.tokens), 1.0, p.dtype)
        excess = tl.dot(ones, p, excess * decay[:, None, :], input_precision="ieee")
    return added, excess


@triton.jit  # type: ignore[untyped-decorator]
def _join_warps(
    outputs: tl.tuple, maximum: tl.tensor, total: tl.tensor, shift: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """The warps' states as one: normalised outputs by part, and the logarithm of the sum of exponentials."""
    PARTS: tl.constexpr = SHAPE.parts
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    whole = tl.sum(total * weight, 0)
    share = weight / tl.where(whole == 0.0, 1.0, whole)[None, :]
    joined: tl.tuple = ()
    for part in tl.static_range(PARTS):
        joined += (tl.sum((outputs[part] + shift[:, None, :]) * share[:, None, :], 0),)
    return joined, (highest + tl.log2(whole)) * LN2


@triton.jit  # type: ignore[untyped-decorator]
def _store_output(
    state: tl.tuple, out: tl.tuple, sequence: tl.tensor, head: tl.tensor, row: tl.tensor, SHAPE: tl.constexpr
) -> None:
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = out.rows + token * out.token_stride + (head * SHAPE.group + row % SHAPE.group) * out.head_stride
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :]
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        numbers = state[0][part].to(out.rows.dtype.element_ty)
        tl.store(place[None, :] + number[:, None], numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store_partial(
    state: tl.tuple,
    partial: tl.tensor,
    lse: tl.tensor,
    segment: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    heads = SHAPE.kv_heads * SHAPE.group
    place = (segment * SHAPE.query_len + row // SHAPE.group) * heads + head * SHAPE.group + row % SHAPE.group
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :]
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        target = partial + place.to(tl.int64)[None, :] * SHAPE.head_dim + number[:, None]
        tl.store(target, state[0][part], mask=inside)
    tl.store(lse + place, state[1], mask=row < SHAPE.rows_used)


def launch(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    work: DecodeWork,
    out: torch.Tensor,
) -> None:
    """`ragged_decode_attention` by one kernel and the merge of split sequences; the arguments have been checked."""
    shape = decode_shape(q, kv, work)
    schedule = work.schedule
    # What gathers granules waits for the table first: the pipeline halves its depth.
    gathers = not shape.one_granule and (shape.paged or shape.scaled)
    ragged_decode_kernel[(len(work.programs) * shape.kv_heads * shape.tiles,)](
        RowArguments(q, q.stride(0), q.stride(1)),
        _kv_arguments(kv, shape.step, schedule.block_kv),
        base_rows, slots, kv_lens, work.programs, work.sequences,
        RowArguments(out, out.stride(0), out.stride(1)),
        work.partial, work.lse, scale, work.window or 0,
        SHAPE=shape,
        num_warps=schedule.warps,
        num_stages=2 * schedule.stages - 1 if gathers else schedule.stages,
        **_register_limit(schedule),
    )  # fmt: skip
    merge_segments(work.partial, work.lse, work.sequences, out)


def _kv_arguments(kv: KvLayer, step: int, block_kv: int) -> KvArguments:
    payload = kv.payload.view(torch.int16) if kv.format.quantized else kv.payload
    row, head, value = (stride // step for stride in unit_strides(kv))
    if row * step * block_kv >= 2**31:
        raise ValueError(f"rows {row * step} units apart: {block_kv} of them must lie within 2^31")
    # What is not there is not read.
    scales = payload if kv.scales is None else kv.scales
    granule, scale_head, scale_value, plane = (0, 0, 0, 0) if kv.scales is None else kv.scales.stride()[:-1]
    table = payload if kv.table is None else kv.table
    return KvArguments(
        payload, row, head, value, scales, granule, scale_head, scale_value, plane, table, table.stride(0)
    )


def _register_limit(schedule: DecodeSchedule) -> dict[str, int]:
    """An option that leaves registers for all programs of an SM."""
    registers = _REGISTERS // (32 * schedule.warps * schedule.ctas_per_sm) // 8 * 8
    return {"maxnreg": registers} if registers < 256 else {}
