"""The CUDA kernel of `ragged_decode_attention`: equal ranges of KV blocks, whatever the lengths; see `decode_work.py`.

Scores are computed transposed, keys as rows and queries as columns, so that few queries fill a tensor core tile. Each
warp takes its own positions of every block, as one batch of the products, with its own running maximum and sum: warps
exchange nothing until the end of a segment. Scales are folded into scores and probabilities.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.decode_kv_triton import KvArguments, Span, block_granule, block_tokens, load_scales, load_units
from bladellm_kernels.decode_prefetch_triton import prefetch_block
from bladellm_kernels.decode_shape import decode_shape, unit_strides
from bladellm_kernels.decode_work import DecodeSchedule, DecodeWork
from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.kv_codes_triton import part_number, unit_numbers
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.merge_attention_triton import merge_segments, merged_rows

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


class PlanArguments(NamedTuple):
    """The sequences of a step as kernel arguments: how `DecodeWork` splits them, and where each one's KV is."""

    programs: Any
    sequences: Any
    base_rows: Any
    slots: Any
    kv_lens: Any


class StateArguments(NamedTuple):
    """Where segments leave their states: `partial`, `lse` and `arrived` of `DecodeWork`."""

    partial: Any
    lse: Any
    arrived: Any


@triton.jit(do_not_specialize=["batch", "window"])  # type: ignore[untyped-decorator]
def ragged_decode_kernel(
    q: tl.tuple,
    kv: tl.tuple,
    plan: tl.tuple,
    out: tl.tuple,
    states: tl.tuple,
    batch: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
    EARLY: tl.constexpr,
    SETTLED: tl.constexpr,
) -> None:
    """Program c · lanes + lane takes range c of the blocks, for one tile of the query rows of one KV head.

    What a segment needs is asked for during the one before: its fields and queries before the loop over the blocks,
    its first blocks, into the L2 cache, beside the last ones of that loop. SETTLED: the plan can be read before the
    kernels before this one have ended.
    """
    lane = tl.program_id(0) % (SHAPE.kv_heads * SHAPE.tiles)
    program = tl.program_id(0) // (SHAPE.kv_heads * SHAPE.tiles)
    head = lane // SHAPE.tiles
    row = (lane % SHAPE.tiles) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    if not SETTLED:
        wait_for_inputs(EARLY)
    block = tl.load(plan.programs + program * 3)
    end = tl.load(plan.programs + program * 3 + 1)
    sequence = tl.load(plan.programs + program * 3 + 2)
    first, last, span = _sequence(plan, sequence, block < end, head, window, SHAPE)
    AHEAD: tl.constexpr = SHAPE.ahead if SHAPE.prefetches else 0
    for ahead in tl.static_range(AHEAD):
        prefetch_block(kv, span, span.lowest // SHAPE.block_kv + block - first + ahead, SHAPE)
    if SETTLED:
        wait_for_inputs(EARLY)
    let_next_start(EARLY)
    numbers = _load_queries(q, sequence, block < end, head, row, SHAPE)
    if SHAPE.merges:
        _store_zeros(plan, out, program, batch, head, row, SHAPE)
    while block < end:
        more = last < end
        next_first, next_last, next_span = _sequence(plan, sequence + 1, more, head, window, SHAPE)
        next_numbers = _load_queries(q, sequence + 1, more, head, row, SHAPE)
        stop = tl.minimum(last, end)
        if stop > block:
            queries = _turn_queries(numbers, scale, SHAPE)
            skipped = span.lowest // SHAPE.block_kv - first
            state = _attend(queries, kv, span, next_span, row, block + skipped, stop + skipped, window, SHAPE)
            if (block == first) & (stop == last):
                _store_output(state, out, sequence, head, row, SHAPE)
            else:
                _store_partial(state, states, program + sequence, head, row, SHAPE)
                if SHAPE.merges:
                    _merge_last(plan, states, out, sequence, lane, head, row, SHAPE)
            block = stop
        sequence += 1
        first = next_first
        last = next_last
        span = next_span
        numbers = next_numbers


@triton.jit  # type: ignore[untyped-decorator]
def _sequence(
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
    return first, last, Span(slot, base_row, lowest, kv_len, head)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: tl.tuple,
    kv: tl.tuple,
    span: tl.tuple,
    next_span: tl.tuple,
    row: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """Blocks [first, stop) of a sequence: normalised outputs by part and warp, [warps, units_padded, rows] each, to be
    added up, and the logarithm of the sum of exponentials [rows]. What comes next is prefetched."""
    PARTS: tl.constexpr = SHAPE.parts
    maximum = tl.full((SHAPE.warps, SHAPE.rows), LOWEST, tl.float32)
    total = tl.full((SHAPE.warps, SHAPE.rows), 0.0, tl.float32)
    shift = tl.full((SHAPE.warps, SHAPE.rows), 0.0, tl.float32)
    outputs: tl.tuple = ()
    for _part in tl.static_range(PARTS):
        outputs += (tl.full((SHAPE.warps, SHAPE.units_padded, SHAPE.rows), 0.0, tl.float32),)
    granule = block_granule(kv, span, first, stop, SHAPE)
    for block in tl.range(first, stop):
        position = block * SHAPE.block_kv
        keys = load_units(kv, span, position, granule, False, SHAPE)
        values = load_units(kv, span, position, granule, True, SHAPE)
        scores = _scores(keys, queries, kv, span, position, granule, SHAPE)
        scores = _hide(scores, span, position, row, window, SHAPE)
        highest = tl.maximum(maximum, tl.max(scores, 1) - SHAPE.raised)
        p = tl.exp2(scores - highest[:, None, :])
        decay = tl.exp2(maximum - highest)
        maximum = highest
        total = total * decay + tl.sum(p, 1)
        if SHAPE.affine:
            zero = load_scales(kv, span, position, granule, True, 1, SHAPE)
            shift = shift * decay + tl.sum(p * zero[:, :, None], 1)
        if SHAPE.scaled:
            p = p * load_scales(kv, span, position, granule, True, 0, SHAPE)[:, :, None]
        outputs = _add_values(outputs, decay, values, p.to(queries[0][0].dtype), SHAPE)
        granule = block_granule(kv, span, block + 1, stop, SHAPE)
        # Where the pipeline has nothing more to ask for.
        if SHAPE.prefetches and block + SHAPE.ahead >= stop:
            prefetch_block(kv, next_span, next_span.lowest // SHAPE.block_kv + block + SHAPE.ahead - stop, SHAPE)
    return _join_warps(outputs, maximum, total, shift, SHAPE)


@triton.jit  # type: ignore[untyped-decorator]
def _load_queries(
    q: tl.tuple, sequence: tl.tensor, known: tl.tensor, head: tl.tensor, row: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """The parts of a sequence's queries, [units_padded, rows] each; zero where it is not known that there are any."""
    PARTS: tl.constexpr = SHAPE.parts
    unit = tl.arange(0, SHAPE.units_padded)
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = q.rows + token * q.token_stride + (head * SHAPE.group + row % SHAPE.group) * q.head_stride
    inside = (unit < SHAPE.units)[:, None] & (row < SHAPE.rows_used)[None, :] & known
    parts: tl.tuple = ()
    for part in tl.static_range(PARTS):
        number = part_number(unit, part, PARTS, SHAPE.head_dim)
        parts += (tl.load(place[None, :] + number[:, None], mask=inside, other=0.0),)
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _turn_queries(parts: tl.tuple, scale: tl.tensor, SHAPE: tl.constexpr) -> tl.tuple:
    """The parts of the queries [warps, units_padded, rows], their sum over the head [rows], and the factor of scores.

    Against quantized memory 16-bit queries become float16, with the largest between 1 and 2.
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
        shrink = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
    sums = tl.full((SHAPE.units_padded, SHAPE.rows), 0.0, tl.float32)
    turned: tl.tuple = ()
    for part in tl.static_range(PARTS):
        numbers = parts[part]
        if SHAPE.scaled and parts[0].dtype != tl.float32:
            numbers = (numbers.to(tl.float32) * shrink).to(tl.float16)
        sums += numbers.to(tl.float32)
        turned += (tl.broadcast_to(numbers[None], (SHAPE.warps, SHAPE.units_padded, SHAPE.rows)),)
    return turned, tl.sum(sums, 0), factor


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
    turned, query_sum, factor = queries
    parts = unit_numbers(keys, turned[0].dtype, FORMAT, PLAIN)
    scores = tl.dot(parts[0], turned[0], input_precision="ieee")
    for part in tl.static_range(1, PARTS):
        scores = tl.dot(parts[part], turned[part], scores, input_precision="ieee")
    if SHAPE.scaled:
        scores *= (load_scales(kv, span, position, granule, False, 0, SHAPE) * factor)[:, :, None]
        if SHAPE.affine:
            zero = load_scales(kv, span, position, granule, False, 1, SHAPE) * factor
            scores += zero[:, :, None] * query_sum[None, None, :]
    else:
        scores *= factor
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _hide(
    scores: tl.tensor, span: tl.tuple, position: tl.tensor, row: tl.tensor, window: tl.tensor, SHAPE: tl.constexpr
) -> tl.tensor:
    """-inf where a row does not see a position, in blocks that have such positions."""
    if (position + SHAPE.block_kv > span.kv_len - SHAPE.query_len + 1) | (position < span.lowest + SHAPE.query_len - 1):
        token = position + block_tokens(SHAPE)
        newest = span.kv_len - SHAPE.query_len + row // SHAPE.group
        visible = token[:, :, None] <= newest[None, None, :]
        if SHAPE.windowed:
            visible &= token[:, :, None] > (newest - window)[None, None, :]
        scores = tl.where(visible, scores, float("-inf"))
    return scores


@triton.jit  # type: ignore[untyped-decorator]
def _add_values(outputs: tl.tuple, decay: tl.tensor, values: tl.tensor, p: tl.tensor, SHAPE: tl.constexpr) -> tl.tuple:
    PARTS: tl.constexpr = SHAPE.parts
    FORMAT: tl.constexpr = SHAPE.format
    PLAIN: tl.constexpr = SHAPE.plain
    parts = unit_numbers(values, p.dtype, FORMAT, PLAIN)
    added: tl.tuple = ()
    for part in tl.static_range(PARTS):
        added += (tl.dot(parts[part], p, outputs[part] * decay[:, None, :], input_precision="ieee"),)
    return added


@triton.jit  # type: ignore[untyped-decorator]
def _join_warps(
    outputs: tl.tuple, maximum: tl.tensor, total: tl.tensor, shift: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    """Normalised outputs by part, which the warps' add up to, and the logarithm of the sum of exponentials."""
    PARTS: tl.constexpr = SHAPE.parts
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    whole = tl.sum(total * weight, 0)
    share = weight / tl.where(whole == 0.0, 1.0, whole)[None, :]
    weighted: tl.tuple = ()
    for part in tl.static_range(PARTS):
        weighted += ((outputs[part] + shift[:, None, :]) * share[:, None, :],)
    return weighted, (highest + tl.log2(whole)) * LN2


@triton.jit  # type: ignore[untyped-decorator]
def _sum_warps(numbers: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """The sum of numbers [warps, units_padded, rows] over warps: halves come to lie in one thread.

    tl.sum exchanges by lanes, twice. Part of the stores, so that numbers come to where these want them at once.
    """
    folded = tl.permute(numbers, (1, 2, 0))
    for level in tl.static_range(1, 6):
        if SHAPE.warps >> level >= 1:
            halves = tl.reshape(folded, (SHAPE.units_padded, SHAPE.rows, SHAPE.warps >> level, 2))
            left, right = tl.split(halves)
            folded = left + right
    return tl.reshape(folded, (SHAPE.units_padded, SHAPE.rows))


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
        numbers = _sum_warps(state[0][part], SHAPE).to(out.rows.dtype.element_ty)
        tl.store(place[None, :] + number[:, None], numbers, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store_partial(
    state: tl.tuple,
    states: tl.tuple,
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
        target = states.partial + place.to(tl.int64)[None, :] * SHAPE.head_dim + number[:, None]
        tl.store(target, _sum_warps(state[0][part], SHAPE), mask=inside)
    tl.store(states.lse + place, state[1], mask=row < SHAPE.rows_used)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_last(
    plan: tl.tuple,
    states: tl.tuple,
    out: tl.tuple,
    sequence: tl.tensor,
    lane: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Count a segment of a lane as done; where it is the sequence's last one, merge them all."""
    first = tl.load(plan.sequences + sequence * 5 + 3)
    count = tl.load(plan.sequences + sequence * 5 + 4)
    arrived = states.arrived + sequence * (SHAPE.kv_heads * SHAPE.tiles) + lane
    # All warps have stored before one thread says so.
    tl.debug_barrier()
    if tl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu") == count - 1:
        heads = SHAPE.kv_heads * SHAPE.group
        place = row // SHAPE.group * heads + head * SHAPE.group + row % SHAPE.group
        COLUMNS: tl.constexpr = SHAPE.columns
        whole = merged_rows(
            states.partial,
            states.lse,
            first,
            count,
            place,
            row < SHAPE.rows_used,
            SHAPE.query_len * heads,
            SHAPE.head_dim,
            SHAPE.rows,
            COLUMNS,
            SHAPE.merged_at_once,
        )
        _store_rows(whole, out, sequence, head, row, SHAPE)
        # For the next launch.
        tl.store(arrived, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_zeros(
    plan: tl.tuple,
    out: tl.tuple,
    program: tl.tensor,
    batch: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """The outputs of sequences of length 0, some of them each program."""
    COLUMNS: tl.constexpr = SHAPE.columns
    sequence = program
    while sequence < batch:
        if tl.load(plan.kv_lens + sequence) == 0:
            _store_rows(tl.full((SHAPE.rows, COLUMNS), 0.0, tl.float32), out, sequence, head, row, SHAPE)
        sequence += tl.num_programs(0) // (SHAPE.kv_heads * SHAPE.tiles)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(
    rows: tl.tensor, out: tl.tuple, sequence: tl.tensor, head: tl.tensor, row: tl.tensor, SHAPE: tl.constexpr
) -> None:
    """Rows [rows, columns] of a sequence's output."""
    column = tl.arange(0, rows.shape[1])
    token = sequence.to(tl.int64) * SHAPE.query_len + row // SHAPE.group
    place = out.rows + token * out.token_stride + (head * SHAPE.group + row % SHAPE.group) * out.head_stride
    inside = (row < SHAPE.rows_used)[:, None] & (column < SHAPE.head_dim)[None, :]
    tl.store(place[:, None] + column[None, :], rows.to(out.rows.dtype.element_ty), mask=inside)


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
    early = early_launch(q.device)
    ragged_decode_kernel[(len(work.programs) * shape.kv_heads * shape.tiles,)](
        RowArguments(q, q.stride(0), q.stride(1)),
        _kv_arguments(kv, shape.step, schedule.block_kv),
        PlanArguments(work.programs, work.sequences, base_rows, slots, kv_lens),
        RowArguments(out, out.stride(0), out.stride(1)),
        StateArguments(work.partial, work.lse, work.arrived),
        len(kv_lens), scale, work.window or 0,
        SHAPE=shape,
        SETTLED=early["EARLY"] and work.used,
        num_warps=schedule.warps,
        num_stages=2 * schedule.stages - 1 if gathers else schedule.stages,
        **_register_limit(schedule),
        **early,
    )  # fmt: skip
    # It let the next kernel start only when its own inputs, the plan among them, were complete.
    work.used = True
    if not shape.merges:
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
