"""The CUDA kernel of `ragged_decode_attention`: equal ranges of KV blocks, whatever the lengths; see `decode_work.py`.

Scores are computed transposed, keys as rows and queries as columns, so that few queries fill a tensor core tile. Each
warp takes its own positions of every block, as one batch of the products, with its own running maximum and sum: warps
exchange nothing until the end of a segment. Scales are folded into scores and probabilities.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from bladellm_kernels.decode_kv_triton import (
    KvArguments,
    Span,
    block_granule,
    block_tokens,
    load_scales,
    load_units,
    token_granules,
)
from bladellm_kernels.decode_queries_triton import RowArguments, load_queries
from bladellm_kernels.decode_shape import decode_shape, unit_strides
from bladellm_kernels.decode_work import DecodeSchedule, DecodeWork
from bladellm_kernels.kv_codes_triton import part_number, raised_numbers, unit_numbers
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.merge_attention_triton import merge_segments

LOWEST = tl.constexpr(-1e30)
"""Below every score, and finite: -inf - LOWEST and LOWEST - LOWEST are no NaN."""
LN2 = tl.constexpr(0.6931471805599453)


_REGISTERS = 65536
"""Of an SM."""


class Visit(NamedTuple):
    """A sequence as a program meets it: its block i has the number `origin` + i in the count over the batch, where its
    blocks end at `end`; `following` is the next sequence that has any, `whole` whether one program has all."""

    sequence: Any
    origin: Any
    end: Any
    following: Any
    whole: Any
    kv_len: Any
    slot: Any
    base_row: Any


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
    """Program c · lanes + lane takes range c of the blocks, for one tile of the query rows of one KV head.

    One loop over the blocks of all its sequences: while one ends, blocks of the next are already on their way.
    """
    lane = tl.program_id(0) % (SHAPE.kv_heads * SHAPE.tiles)
    program = tl.program_id(0) // (SHAPE.kv_heads * SHAPE.tiles)
    head = lane // SHAPE.tiles
    row = (lane % SHAPE.tiles) * SHAPE.rows + tl.arange(0, SHAPE.rows)
    if SHAPE.overlapped:
        # The merge may take its place; it waits for the end of this kernel.
        gdc_launch_dependents()
    begin = tl.load(programs + program * 4)
    end = tl.load(programs + program * 4 + 1)
    tables = (sequences, kv_lens, slots, base_rows)
    visit = _visit(tables, tl.load(programs + program * 4 + 2))
    ahead = _visit(tables, tl.load(programs + program * 4 + 3))
    granule = block_granule(kv, _span(visit, head, window, SHAPE), begin - visit.origin, SHAPE)
    starts = begin < end
    # Nothing is loaded yet: the first blocks go ahead.
    queries = load_queries(q, visit.sequence, head, row, begin > end, scale, SHAPE)
    state = _no_state(SHAPE)
    for block in tl.range(begin, end):
        span = _span(visit, head, window, SHAPE)
        position = (block - visit.origin) * SHAPE.block_kv
        granules = token_granules(kv, span, position, granule, SHAPE)
        keys = load_units(kv, span, position, granules, False, SHAPE)
        values = load_units(kv, span, position, granules, True, SHAPE)
        if starts:
            queries = load_queries(q, visit.sequence, head, row, starts, scale, SHAPE)
        state = _attend(state, queries, keys, values, kv, span, row, position, granules, window, SHAPE)
        starts = block + 1 == visit.end
        if starts | (block + 1 == end):
            joined = _join_warps(state, SHAPE)
            if visit.whole:
                _store_output(joined, out, visit.sequence, head, row, SHAPE)
            else:
                _store_partial(joined, partial, lse, program + visit.sequence, head, row, SHAPE)
            state = _no_state(SHAPE)
        if starts:
            visit = ahead
            ahead = _visit(tables, visit.following)
        granule = block_granule(kv, _span(visit, head, window, SHAPE), block + 1 - visit.origin, SHAPE)


@triton.jit  # type: ignore[untyped-decorator]
def _visit(tables: tl.tuple, sequence: tl.tensor) -> tl.tuple:
    """All that is known of a sequence, asked for at once: what waits, waits for one of these."""
    sequences, kv_lens, slots, base_rows = tables
    place = sequences + sequence * 5
    return Visit(
        sequence,
        tl.load(place),
        tl.load(place + 1),
        tl.load(place + 2),
        tl.load(place + 4) == 1,
        tl.load(kv_lens + sequence).to(tl.int32),
        tl.load(slots + sequence),
        tl.load(base_rows + sequence),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _span(visit: tl.tuple, head: tl.tensor, window: tl.tensor, SHAPE: tl.constexpr) -> tl.tuple:
    lowest = tl.maximum(visit.kv_len - SHAPE.query_len + 1 - window, 0) if SHAPE.windowed else 0
    return Span(visit.slot, visit.base_row, lowest, visit.kv_len, head)


@triton.jit  # type: ignore[untyped-decorator]
def _no_state(SHAPE: tl.constexpr) -> tl.tuple:
    """What warps know before their first block: outputs by part, maximum, sum of exponentials."""
    PARTS: tl.constexpr = SHAPE.parts
    outputs: tl.tuple = ()
    for _part in tl.static_range(PARTS):
        outputs += (tl.full((SHAPE.warps, SHAPE.units_padded, SHAPE.rows), 0.0, tl.float32),)
    lowest = tl.full((SHAPE.warps, SHAPE.rows), LOWEST, tl.float32)
    nothing = tl.full((SHAPE.warps, SHAPE.rows), 0.0, tl.float32)
    return outputs, lowest, nothing


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    state: tl.tuple,
    queries: tl.tuple,
    keys: tl.tensor,
    values: tl.tensor,
    kv: tl.tuple,
    span: tl.tuple,
    row: tl.tensor,
    position: tl.tensor,
    granule: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """The state after one more block."""
    outputs, maximum, total = state
    scores = _scores(keys, queries, kv, span, position, granule, SHAPE)
    scores = _hide(scores, span, position, row, window, SHAPE)
    highest = tl.maximum(maximum, tl.max(scores, 1) - SHAPE.raised)
    p = tl.exp2(scores - highest[:, None, :])
    decay = tl.exp2(maximum - highest)
    total = total * decay + tl.sum(p, 1)
    zeros = tl.full((SHAPE.warps, SHAPE.rows), 0.0, tl.float32)
    if SHAPE.scaled:
        scale = load_scales(kv, span, position, granule, True, 0, SHAPE)
        if SHAPE.affine:
            zero = load_scales(kv, span, position, granule, True, 1, SHAPE)
            zeros = tl.sum(p * zero[:, :, None], 1)
            # The pipeline takes in only loads that a factor of a product depends on.
            scale += zero * 0.0
        p = p * scale[:, :, None]
    outputs = _add_values(outputs, decay, zeros, values, p.to(queries[0][0].dtype), SHAPE)
    return outputs, highest, total


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
    turned, query_sum, excess, factor = queries
    parts = raised_numbers(keys, turned[0].dtype, FORMAT, PLAIN)
    scores = tl.broadcast_to(-excess[:, None, :], (SHAPE.warps, SHAPE.tokens, SHAPE.rows))
    for part in tl.static_range(PARTS):
        scores = tl.dot(parts[part], turned[part], scores, input_precision="ieee")
    if SHAPE.scaled:
        scores *= (load_scales(kv, span, position, granule, False, 0, SHAPE) * factor)[:, :, None]
        if SHAPE.affine:
            zero = load_scales(kv, span, position, granule, False, 1, SHAPE) * factor
            scores += zero[:, :, None] * query_sum[:, None, :]
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
def _add_values(
    outputs: tl.tuple, decay: tl.tensor, zeros: tl.tensor, values: tl.tensor, p: tl.tensor, SHAPE: tl.constexpr
) -> tl.tuple:
    PARTS: tl.constexpr = SHAPE.parts
    FORMAT: tl.constexpr = SHAPE.format
    PLAIN: tl.constexpr = SHAPE.plain
    parts = unit_numbers(values, p.dtype, FORMAT, PLAIN)
    added: tl.tuple = ()
    for part in tl.static_range(PARTS):
        kept = outputs[part] * decay[:, None, :]
        if SHAPE.affine:
            kept += zeros[:, None, :]
        added += (tl.dot(parts[part], p, kept, input_precision="ieee"),)
    return added


@triton.jit  # type: ignore[untyped-decorator]
def _join_warps(state: tl.tuple, SHAPE: tl.constexpr) -> tl.tuple:
    """The warps' states as one: normalised outputs by part, and the logarithm of the sum of exponentials."""
    PARTS: tl.constexpr = SHAPE.parts
    outputs, maximum, total = state
    highest = tl.max(maximum, 0)
    weight = tl.exp2(maximum - highest[None, :])
    whole = tl.sum(total * weight, 0)
    share = weight / tl.where(whole == 0.0, 1.0, whole)[None, :]
    joined: tl.tuple = ()
    for part in tl.static_range(PARTS):
        joined += (tl.sum(outputs[part] * share[:, None, :], 0),)
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
    # What gathers granules waits for the table first: the pipeline halves its depth. Their names take shared memory,
    # which tiles of unquantized numbers leave too little of.
    gathers = not shape.one_granule and (shape.paged or shape.scaled)
    stages = schedule.stages if shape.scaled or not gathers else max(schedule.stages - 1, 2)
    ragged_decode_kernel[(len(work.programs) * shape.kv_heads * shape.tiles,)](
        RowArguments(q, q.stride(0), q.stride(1)),
        _kv_arguments(kv, shape.step, schedule.block_kv),
        base_rows, slots, kv_lens, work.programs, work.sequences,
        RowArguments(out, out.stride(0), out.stride(1)),
        work.partial, work.lse, scale, work.window or 0,
        SHAPE=shape,
        num_warps=schedule.warps,
        num_stages=2 * stages - 1 if gathers else stages,
        **_register_limit(schedule),
    )  # fmt: skip
    merge_segments(work.partial, work.lse, work.sequences, out, shape.overlapped)


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
