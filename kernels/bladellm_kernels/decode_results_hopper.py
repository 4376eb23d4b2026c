"""The results of `ring_decode_hopper` are written, or left as partial states, and those of several programs merged."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.decode_states_triton import LN2
from bladellm_kernels.decode_warps_hopper import log_layout, sums_layout
from bladellm_kernels.kv_codes_triton import part_number
from bladellm_kernels.merge_attention_triton import LOWEST

TOGETHER = gl.constexpr(4)
"""Segments that are asked for at once."""


class States(NamedTuple):
    """Where segments leave their states, `partial` and `lse` of `DecodeWork`, and `arrived`, int32 [sequences, lanes],
    zeros: how many segments of a sequence are there."""

    partial: Any
    lse: Any
    arrived: Any


class Target(NamedTuple):
    """What a program writes for: KV heads from `head`, query rows from `row` on; lane: of the heads' tiles of rows."""

    head: gl.tensor
    row: gl.tensor
    lane: gl.tensor


@gluon.jit  # type: ignore[untyped-decorator]
def store_output(results: gl.tuple, out: gl.tuple, sequence: gl.tensor, target: gl.tuple, SHAPE: gl.constexpr) -> None:
    """The outputs of a whole sequence."""
    HEADS: gl.constexpr = SHAPE.lane_heads
    for each in gl.static_range(HEADS):
        _store_head(results[each][0], out, sequence, target.head + each, target.row, SHAPE)


@gluon.jit  # type: ignore[untyped-decorator]
def _store_head(
    sums: gl.tuple, out: gl.tuple, sequence: gl.tensor, head: gl.tensor, first: gl.tensor, SHAPE: gl.constexpr
) -> None:
    PARTS: gl.constexpr = SHAPE.parts
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    unit, row = _places(first, SHAPE)
    place = out.rows + _row_offset(out, sequence, head, row, SHAPE)
    for part in gl.static_range(PARTS):
        number = part_number(unit, part, PARTS, HEAD_DIM)
        numbers = sums[part].to(out.rows.dtype.element_ty)
        gl.store(place[None, :] + number[:, None], numbers, mask=(row < SHAPE.rows_used)[None, :])


@gluon.jit  # type: ignore[untyped-decorator]
def store_partial(
    results: gl.tuple, states: gl.tuple, segment: gl.tensor, target: gl.tuple, SHAPE: gl.constexpr
) -> None:
    """The results of a segment."""
    HEADS: gl.constexpr = SHAPE.lane_heads
    for each in gl.static_range(HEADS):
        _store_state(results[each][0], results[each][1], states, segment, target.head + each, target.row, SHAPE)


@gluon.jit  # type: ignore[untyped-decorator]
def _store_state(
    sums: gl.tuple,
    log: gl.tensor,
    states: gl.tuple,
    segment: gl.tensor,
    head: gl.tensor,
    first: gl.tensor,
    SHAPE: gl.constexpr,
) -> None:
    PARTS: gl.constexpr = SHAPE.parts
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    unit, row = _places(first, SHAPE)
    place = _state_rows(segment, head, row, SHAPE).to(gl.int64) * SHAPE.head_dim
    for part in gl.static_range(PARTS):
        number = part_number(unit, part, PARTS, HEAD_DIM)
        mask = (row < SHAPE.rows_used)[None, :]
        gl.store(states.partial + place[None, :] + number[:, None], sums[part], mask=mask)
    LOG: gl.constexpr = log_layout(SHAPE)
    row = first + gl.arange(0, SHAPE.rows, layout=LOG)
    place = _state_rows(segment, head, row, SHAPE)
    gl.store(states.lse + place, log * LN2, mask=row < SHAPE.rows_used)


@gluon.jit  # type: ignore[untyped-decorator]
def count_arrived(
    states: gl.tuple, sequence: gl.tensor, segments: gl.tuple, target: gl.tuple, SHAPE: gl.constexpr
) -> gl.tensor:
    """How many segments of a sequence have left their states so far; 0 where it has one."""
    arrived = sequence * 0
    if segments[1] > 1:
        arrived = gl.atomic_add(_counter(states, sequence, target, SHAPE), 0, sem="relaxed")
    return arrived


@gluon.jit  # type: ignore[untyped-decorator]
def join_segment(
    results: gl.tuple,
    states: gl.tuple,
    segment: gl.tensor,
    segments: gl.tuple,
    arrived: gl.tensor,
    out: gl.tuple,
    sequence: gl.tensor,
    target: gl.tuple,
    SHAPE: gl.constexpr,
) -> None:
    """Leave the state of a segment, or, where those of all others are there, write the sequence's output. segments: the
    first one's number, and how many; arrived: what `count_arrived` said before: the last program need not leave its
    own state."""
    first, count = segments
    counter = _counter(states, sequence, target, SHAPE)
    last = arrived == count - 1
    if last:
        # What the one that counted was told holds for the others behind the barrier.
        gl.inline_asm_elementwise("fence.acq_rel.gpu; mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
        gl.thread_barrier()
    else:
        store_partial(results, states, segment, target, SHAPE)
        # All threads' numbers are written before the one that counts says so.
        gl.thread_barrier()
        last = gl.atomic_add(counter, 1, sem="acq_rel") == count - 1
    if last:
        gl.store(counter, 0)
        HEADS: gl.constexpr = SHAPE.lane_heads
        for each in gl.static_range(HEADS):
            head = target.head + each
            sums = _merge_segments(results[each], states, segment, first, count, head, target.row, SHAPE)
            _store_head(sums, out, sequence, head, target.row, SHAPE)


@gluon.jit  # type: ignore[untyped-decorator]
def _counter(states: gl.tuple, sequence: gl.tensor, target: gl.tuple, SHAPE: gl.constexpr) -> gl.tensor:
    return states.arrived + sequence * SHAPE.lanes + target.lane


@gluon.jit  # type: ignore[untyped-decorator]
def _merge_segments(
    result: gl.tuple,
    states: gl.tuple,
    own: gl.tensor,
    first: gl.tensor,
    segments: gl.tensor,
    head: gl.tensor,
    first_row: gl.tensor,
    SHAPE: gl.constexpr,
) -> gl.tuple:
    """Outputs by part of segments [first, first + segments) of a head, the program's own among them; always in their
    order, so that it does not matter which came last. Read past the L1 cache, which does not see what others write."""
    PARTS: gl.constexpr = SHAPE.parts
    HEAD_DIM: gl.constexpr = SHAPE.head_dim
    sums, log = result
    unit, row = _places(first_row, SHAPE)
    # Rounded as what others read of it.
    own_log = log * LN2 * (1.0 / LN2)
    maximum = row * 0.0 + LOWEST
    total = row * 0.0
    whole: gl.tuple = ()
    for _part in gl.static_range(PARTS):
        whole += (gl.full((SHAPE.units, SHAPE.rows), 0.0, gl.float32, sums_layout(SHAPE)),)
    for start in range(0, segments, TOGETHER):
        for index in gl.static_range(TOGETHER):
            segment = row * 0 + (first + start + index)
            used = (row < SHAPE.rows_used) & (segment < first + segments)
            other = used & (segment != own)
            place = _state_rows(segment, head, row, SHAPE)
            found = gl.load(states.lse + place, mask=other, other=float("-inf"), cache_modifier=".cg") * (1.0 / LN2)
            logs = gl.where(used & (segment == own), own_log, found)
            highest = gl.maximum(maximum, logs)
            weight, decay = gl.exp2(logs - highest), gl.exp2(maximum - highest)
            places = states.partial + (place.to(gl.int64) * SHAPE.head_dim)[None, :]
            added: gl.tuple = ()
            for part in gl.static_range(PARTS):
                number = part_number(unit, part, PARTS, HEAD_DIM)[:, None]
                outputs = gl.load(places + number, mask=other[None, :], other=0.0, cache_modifier=".cg")
                outputs = gl.where((segment == own)[None, :], sums[part], outputs)
                added += (whole[part] * decay[None, :] + outputs * weight[None, :],)
            whole = added
            total = total * decay + weight
            maximum = highest
    merged: gl.tuple = ()
    for part in gl.static_range(PARTS):
        merged += (whole[part] / gl.where(total == 0.0, 1.0, total)[None, :],)
    return merged


@gluon.jit  # type: ignore[untyped-decorator]
def clear_empty(
    empties: gl.tensor,
    count: gl.tensor,
    program: gl.tensor,
    programs: gl.tensor,
    out: gl.tuple,
    target: gl.tuple,
    SHAPE: gl.constexpr,
) -> None:
    """Zeros for a program's share of the sequences of length 0, which `empties` lists behind their count."""
    PARTS: gl.constexpr = SHAPE.parts
    zeros: gl.tuple = ()
    for _part in gl.static_range(PARTS):
        zeros += (gl.full((SHAPE.units, SHAPE.rows), 0.0, gl.float32, sums_layout(SHAPE)),)
    HEADS: gl.constexpr = SHAPE.lane_heads
    for index in range(program, count, programs):
        for each in gl.static_range(HEADS):
            _store_head(zeros, out, gl.load(empties + 1 + index), target.head + each, target.row, SHAPE)


@gluon.jit  # type: ignore[untyped-decorator]
def _places(first: gl.tensor, SHAPE: gl.constexpr) -> gl.tuple:
    """Units, and query rows from `first` on."""
    LAYOUT: gl.constexpr = sums_layout(SHAPE)
    unit = gl.arange(0, SHAPE.units, layout=gl.SliceLayout(1, LAYOUT))
    return unit, first + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(0, LAYOUT))


@gluon.jit  # type: ignore[untyped-decorator]
def _row_offset(out: gl.tuple, sequence: gl.tensor, head: gl.tensor, row: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Of query rows of a KV head of a sequence."""
    token = sequence.to(gl.int64) * SHAPE.query_len + row // SHAPE.group
    return token * out.token_stride + (head * SHAPE.group + row % SHAPE.group) * out.head_stride


@gluon.jit  # type: ignore[untyped-decorator]
def _state_rows(segment: gl.tensor, head: gl.tensor, row: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """Where a segment's states of these query rows are."""
    heads = SHAPE.kv_heads * SHAPE.group
    return (segment * SHAPE.query_len + row // SHAPE.group) * heads + head * SHAPE.group + row % SHAPE.group
