"""The CUDA kernel of `ragged_decode_attention`: equal ranges of KV blocks, whatever the lengths; see `decode_work.py`.

Scores are computed transposed, keys as rows and queries as columns, so that few queries fill a tensor core tile. Each
warp takes its own positions of every block, as one batch of the products, with its own running maximum and sum: warps
exchange nothing until the end of a segment. Scales are folded into scores and probabilities.
"""

import torch
import triton
import triton.language as tl

from bladellm_kernels import ring_decode, warp_rings
from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_kv_triton import (
    block_granule,
    block_tokens,
    inside_span,
    is_whole,
    load_scales,
    load_units,
)
from bladellm_kernels.decode_launch import kv_arguments, plan_arguments, register_limit, row_arguments
from bladellm_kernels.decode_queries_triton import (
    PlanArguments,
    first_granule,
    load_queries,
    load_sequence,
    turn_queries,
)
from bladellm_kernels.decode_shape import decode_shape
from bladellm_kernels.decode_states_triton import (
    StateArguments,
    join_warps,
    store_output,
    store_partial,
)
from bladellm_kernels.decode_work import DecodeWork
from bladellm_kernels.early_launch import early_launch, let_next_start, linger, stay_until, wait_for_inputs
from bladellm_kernels.kv_codes_triton import separate_values, unit_numbers
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.merge_attention_triton import merge_segments

LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: -inf - LOWEST and LOWEST - LOWEST are no NaN."""


@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["base_rows", "slots", "kv_lens", "shares", "programs", "sequences"],
)  # type: ignore[untyped-decorator]
def ragged_decode_kernel(
    q: tl.tuple,
    kv: tl.tuple,
    base_rows: tl.tensor,
    slots: tl.tensor,
    kv_lens: tl.tensor,
    shares: tl.tensor,
    programs: tl.tensor,
    sequences: tl.tensor,
    out: tl.tuple,
    states: tl.tuple,
    scale: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
    EARLY: tl.constexpr,
    SETTLED: tl.constexpr,
) -> None:
    """Program c · lanes + lane takes range c of the blocks, for one tile of the query rows of one KV head.

    What describes a segment is asked for before the loop over the one before it. SETTLED: the plan can be read at once.
    """
    lane = tl.program_id(0) % (SHAPE.kv_heads * SHAPE.tiles)
    program = tl.program_id(0) // (SHAPE.kv_heads * SHAPE.tiles)
    head = lane // SHAPE.tiles
    row = (lane % SHAPE.tiles) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    plan = PlanArguments(sequences, base_rows, slots, kv_lens, shares)
    if not SETTLED:
        wait_for_inputs(EARLY)
    block = tl.load(programs + program * 3)
    end = tl.load(programs + program * 3 + 1)
    sequence = tl.load(programs + program * 3 + 2)
    first, last, span = load_sequence(plan, sequence, block < end, head, window, SHAPE)
    if SETTLED:
        wait_for_inputs(EARLY)
    let_next_start(EARLY)
    leaves = linger(block >= end, SHAPE.idle_ns, SHAPE.stay_ns)
    numbers = load_queries(q, plan, sequence, block < end, head, row, SHAPE)
    granule = first_granule(kv, span, (span.lowest // SHAPE.block_kv + block - first) * SHAPE.block_kv, SHAPE)
    while block < end:
        more = last < end
        next_first, next_last, next_span = load_sequence(plan, sequence + 1, more, head, window, SHAPE)
        next_numbers = load_queries(q, plan, sequence + 1, more, head, row, SHAPE)
        stop = tl.minimum(last, end)
        if stop > block:
            queries = turn_queries(numbers, scale, SHAPE)
            skipped = span.lowest // SHAPE.block_kv - first
            state, next_granule = _attend(
                queries, kv, span, next_span, granule, row, block + skipped, stop + skipped, window, SHAPE
            )
            whole = (block == first) & (stop == last) & is_whole(span, SHAPE)
            _store(state, out, states, whole, sequence, program + sequence, head, row, SHAPE)
            block = stop
        else:
            next_granule = first_granule(kv, next_span, next_span.lowest, SHAPE)
        sequence += 1
        first, last = next_first, next_last
        span = next_span
        numbers = next_numbers
        granule = next_granule
    stay_until(leaves, SHAPE.stay_ns)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    state: tl.tuple,
    out: tl.tuple,
    states: tl.tuple,
    whole: tl.tensor,
    sequence: tl.tensor,
    segment: tl.tensor,
    head: tl.tensor,
    row: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """The state of a segment: the sequence's output where it is all of it."""
    if whole:
        store_output(state, out, sequence, head, row, SHAPE)
    else:
        store_partial(state, states, segment, head, row, SHAPE)


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: tl.tuple,
    kv: tl.tuple,
    span: tl.tuple,
    coming: tl.tuple,
    granule: tl.tensor,
    row: tl.tensor,
    first: tl.tensor,
    stop: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """Blocks [first, stop) of a sequence: normalised outputs by part and warp, [warps, units_padded, rows] each, to be
    added up, and the logarithm of the sum of exponentials [rows].

    granule: of the first block; that of the first block of the next span, `coming`, is returned too, asked for before
    the warps wait for one another.
    """
    PARTS: tl.constexpr = SHAPE.parts
    maximum = tl.full((SHAPE.warps, SHAPE.rows), LOWEST, tl.float32)
    total = tl.full((SHAPE.warps, 8, SHAPE.rows), 0.0, tl.float32)
    shift = tl.full((SHAPE.warps, 8, SHAPE.rows), 0.0, tl.float32)
    outputs: tl.tuple = ()
    for _part in tl.static_range(PARTS):
        outputs += (tl.full((SHAPE.warps, SHAPE.units_padded, SHAPE.rows), 0.0, tl.float32),)
    excess = tl.full((SHAPE.warps, 16, SHAPE.rows), 0.0, tl.float32)
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
    next_granule = first_granule(kv, coming, coming.lowest, SHAPE)
    total, shift = tl.sum(total, 1), tl.sum(shift, 1)
    if SHAPE.code_step != 1.0 or SHAPE.nibbles:
        outputs = separate_values(outputs, SHAPE)
    if SHAPE.offset != 0:
        shift -= tl.sum(excess, 1) * (SHAPE.offset / 16)
    return join_warps(outputs, maximum, total, shift, SHAPE), next_granule


@triton.jit  # type: ignore[untyped-decorator]
def _sum_by_lane(numbers: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """Sums over every eighth position, [warps, 8, rows]: those that a lane holds itself."""
    return tl.sum(tl.reshape(numbers, (SHAPE.warps, SHAPE.tokens // 8, 8, SHAPE.rows)), 1)


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
    STEP: tl.constexpr = SHAPE.score_step
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
    if (position + SHAPE.block_kv > span.kv_len - SHAPE.causal_len + 1) | (
        position < span.lowest + SHAPE.causal_len - 1
    ):
        token = position + block_tokens(SHAPE)
        newest = span.kv_len - SHAPE.causal_len + row * 0
        if SHAPE.causal_len > 1:
            newest += row // SHAPE.group
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


def runs_beside(q: torch.Tensor, kv: KvLayer, work: DecodeWork) -> bool:
    """Whether the kernel that merges all segments itself takes such queries."""
    takes = work.schedule.warp_specialized and not work.schedule.private_rings
    return takes and ring_decode.joins(work) and ring_decode.takes(q, kv, decode_shape(q, kv, work))


def launch(call: DecodeCall) -> None:
    """`ragged_decode_attention` by one kernel and the merge of split sequences."""
    if not launch_segments(call):
        merge_segments(call.work, call.out)


def launch_segments(call: DecodeCall) -> bool:
    """The outputs of sequences that are one segment, and the states of the others' segments, or, if True is returned,
    their outputs too."""
    work, schedule = call.work, call.work.schedule
    if call.beside and not runs_beside(call.q, call.kv, work):
        raise ValueError("no kernel for these queries runs beside prefill attention: ask `runs_beside` first")
    shape = decode_shape(call.q, call.kv, work)
    if schedule.private_rings and warp_rings.takes(call, shape):
        return warp_rings.launch(call, shape)
    if schedule.warp_specialized and ring_decode.takes(call.q, call.kv, shape):
        return ring_decode.launch(call, shape)
    shape = shape.of_one_head()
    # What gathers granules waits for the table first: the pipeline halves its depth.
    gathers = not shape.one_granule and (shape.paged or shape.scaled)
    early = early_launch(call.q.device)
    ragged_decode_kernel[(len(work.programs) * shape.kv_heads * shape.tiles,)](
        row_arguments(call.q),
        kv_arguments(call.kv, shape.step, schedule.block_kv),
        *plan_arguments(call),
        row_arguments(call.out),
        StateArguments(work.partial, work.lse),
        call.scale, work.window or 0,
        SHAPE=shape,
        SETTLED=early["EARLY"] and work.used,
        num_warps=shape.warps,
        num_stages=2 * schedule.stages - 1 if gathers else schedule.stages + schedule.warp_specialized,
        **register_limit(32 * shape.warps * schedule.ctas_per_sm),
        **early,
    )  # fmt: skip
    # It let the next kernel start only when its own inputs, the plan among them, were complete.
    work.used = True
    return False
