"""CUDA kernels that merge partial states of attention: any parts, and the segments of decode attention."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.decode_work import DecodeWork
from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.power_of_two import power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e30)
"""Below every logarithm, and finite: -inf - LOWEST is no NaN."""
_ROWS = 8
_WARP_NUMBERS = 2048
"""Of partial outputs that one warp has in registers at once."""
_MOST_SEGMENTS = 64
"""That are read at once: then of 32 columns each, whole lines of 128 bytes."""
MERGE_REGISTERS = 64
"""Of a thread that merges segments beside attention."""
_BESIDE_NUMBERS = 1024
"""Of partial outputs that a warp has in those at once."""


class Part(NamedTuple):
    """Output [T, H, D] and logarithm [T, H] of a part, or the whole; strides in elements."""

    output: Any
    token_stride: Any
    head_stride: Any
    lse: Any
    lse_token_stride: Any
    lse_head_stride: Any


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def merge_parts_kernel(
    parts: tl.tuple,
    out: tl.tuple,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    LSE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """A program merges ROWS of rows = T · HEADS; LSE: the logarithms of the whole are asked for.

    Outputs are read whatever their logarithms: a mask made of those would put the two reads one behind the other.
    """
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    maximum = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.full((ROWS,), 0.0, tl.float32)
    whole = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    inside = (row < rows)[:, None] & (column < HEAD_DIM)[None, :]
    for index in tl.static_range(PARTS):
        part = parts[index]
        place = row // HEADS * part.token_stride + row % HEADS * part.head_stride
        output = tl.load(part.output + place[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
        place = row // HEADS * part.lse_token_stride + row % HEADS * part.lse_head_stride
        lse = tl.load(part.lse + place, mask=row < rows, other=float("-inf")) * LOG2E
        highest = tl.maximum(maximum, lse)
        weight = tl.exp2(lse - highest)
        decay = tl.exp2(maximum - highest)
        # What a part that holds nothing has as its output may be no number.
        whole = whole * decay[:, None] + tl.where((weight > 0)[:, None], output * weight[:, None], 0.0)
        total = total * decay + weight
        maximum = highest
    whole = whole / tl.where(total == 0.0, 1.0, total)[:, None]
    place = row // HEADS * out.token_stride + row % HEADS * out.head_stride
    tl.store(out.output + place[:, None] + column[None, :], whole.to(out.output.dtype.element_ty), mask=inside)
    if LSE:
        place = row // HEADS * out.lse_token_stride + row % HEADS * out.lse_head_stride
        logs = tl.where(total == 0.0, float("-inf"), (maximum + tl.log2(total)) / LOG2E)
        tl.store(out.lse + place, logs, mask=row < rows)


class Segments(NamedTuple):
    """Partial states: `partial`, `lse` and `sequences` of a `DecodeWork`."""

    partial: Any
    lse: Any
    sequences: Any


class Shares(NamedTuple):
    """Of each sequence of a batch the tokens that it shares with others, and its place among those that share."""

    tokens: Any
    places: Any


@triton.jit  # type: ignore[untyped-decorator]
def merge_segments_kernel(
    own: tl.tuple,
    shared: tl.tuple,
    shares: tl.tuple,
    merges: tl.tensor,
    out: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    QUERY_LEN: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    LATE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (i, row, tile) merges COLUMNS of a row, of QUERY_LEN · HEADS, of every sequence i, i + programs, ... of
    `merges`.

    MEMBERS: sequences that a shared beginning has room for, or 0: nothing is shared. The kernel may start early only
    after a kernel that has waited for the plan before it let this one start: what there is to merge is read meanwhile.
    LATE: see `DecodeSchedule`.
    """
    let_next_start(EARLY and not LATE)
    row = tl.program_id(1)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    number = tl.load(merges)
    sequence, first, count = _listed(merges, own, tl.program_id(0), number)
    wait_for_inputs(EARLY)
    let_next_start(EARLY and LATE)
    for index in range(tl.program_id(0), number, tl.num_programs(0)):
        following = _listed(merges, own, index + tl.num_programs(0), number)
        state = (LOWEST + row * 0.0, row * 0.0, tl.full((COLUMNS,), 0.0, tl.float32))
        state = _add_segments(state, own, first, count, row, column, QUERY_LEN * HEADS, HEAD_DIM, SEGMENTS)
        if MEMBERS > 0:
            place = tl.load(shares.places + sequence).to(tl.int32)
            known = tl.load(shares.tokens + sequence) > 0
            begin, parts = _segments_of(shared, place // MEMBERS, known)
            there = place % MEMBERS * HEADS + row
            state = _add_segments(state, shared, begin, parts, there, column, MEMBERS * HEADS, HEAD_DIM, SEGMENTS)
        whole = state[2] / tl.where(state[1] == 0.0, 1.0, state[1])
        token = sequence.to(tl.int64) * QUERY_LEN + row // HEADS
        place = out + token * token_stride + row % HEADS * head_stride
        tl.store(place + column, whole.to(out.dtype.element_ty), mask=column < HEAD_DIM)
        sequence, first, count = following


@triton.jit  # type: ignore[untyped-decorator]
def _listed(merges: tl.tensor, own: tl.tuple, index: tl.tensor, number: tl.tensor) -> tl.tuple:
    """The index-th sequence of a list of `number`, its first segment and how many it has; 0 behind the end."""
    sequence = tl.load(merges + 1 + index, mask=index < number, other=0)
    first, count = _segments_of(own, sequence, index < number)
    return sequence, first, count


@triton.jit  # type: ignore[untyped-decorator]
def _segments_of(segments: tl.tuple, sequence: tl.tensor, known: tl.tensor) -> tl.tuple:
    """A sequence's first segment, and how many it has; 0 of one that is not known."""
    place = segments.sequences + sequence * 5
    return tl.load(place + 3, mask=known, other=0), tl.load(place + 4, mask=known, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _add_segments(
    state: tl.tuple,
    segments: tl.tuple,
    first: tl.tensor,
    count: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SEGMENTS: tl.constexpr,
) -> tl.tuple:
    """The state of a row, maximum, total and sums of its columns, with a row, of ROWS, of segments [first, first +
    count) added."""
    maximum, total, whole = state
    for start in range(0, count, SEGMENTS):
        segment = start + tl.arange(0, SEGMENTS)
        place = (first + segment).to(tl.int64) * ROWS + row
        # Past the L1 cache, which may hold what was here before.
        logs = tl.load(segments.lse + place, mask=segment < count, other=float("-inf"), cache_modifier=".cg") * LOG2E
        places = segments.partial + place[:, None] * HEAD_DIM + column[None, :]
        mask = (segment < count)[:, None]
        # Tiles of a power of two end with it, and a mask that says so leaves fewer reads under way at once.
        if HEAD_DIM & (HEAD_DIM - 1):
            mask &= (column < HEAD_DIM)[None, :]
        outputs = tl.load(places, mask=mask, other=0.0, cache_modifier=".cg")
        highest = tl.maximum(maximum, tl.max(logs, 0))
        weights = tl.exp2(logs - highest)
        decay = tl.exp2(maximum - highest)
        whole = whole * decay + tl.sum(outputs * weights[:, None], 0)
        total = total * decay + tl.sum(weights, 0)
        maximum = highest
    return maximum, total, whole


def merge_parts(
    outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor], out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """`merge_attention` by one kernel; the arguments have been checked."""
    tokens, heads, head_dim = out.shape
    whole = lses[0] if lse is None else lse
    merge_parts_kernel[(triton.cdiv(tokens * heads, _ROWS),)](
        tuple(map(_part, outs, lses)),
        _part(out, whole),
        tokens * heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROWS=_ROWS,
        COLUMNS=power_of_two(head_dim),
        PARTS=len(outs),
        LSE=lse is not None,
        **early_launch(out.device),
    )


def compile_merges(q: torch.Tensor, parts: int) -> None:
    """Compile and load what `merge_parts` of 2 to so many parts needs, and of one fewer with the logarithms of the
    whole, by launches of no programs.

    q: [0, H, D], such as the outputs. Logarithms lie as those of cuDNN's attention do, those of a head side by side,
    the last part's at whole 16 bytes or not: it begins where a chunk does.
    """
    lse = torch.empty(q.shape[1], 1 << 7, dtype=torch.float32, device=q.device).t()
    for count in range(2, parts + 1):
        for last in (lse, lse[1:]):
            merge_parts([q] * count, [*[lse] * (count - 1), last], q)
    merge_parts([q] * (parts - 1), [lse] * (parts - 1), q, lse)


def _part(output: torch.Tensor, lse: torch.Tensor) -> Part:
    return Part(output, output.stride(0), output.stride(1), lse, lse.stride(0), lse.stride(1))


def merge_segments(work: DecodeWork, out: torch.Tensor, shared: DecodeWork | None = None, places: Any = None) -> None:
    """Write the rows of sequences that are several segments, or none.

    shared: what is read once for several sequences; places: int64 [B], of each sequence among the members of those.
    """
    heads, head_dim = out.shape[1:]
    rows, width = work.partial.shape[1], power_of_two(head_dim)
    batch, programs = len(work.sequences), len(work.programs)
    tile = merge_tile(programs, batch, width, work.schedule)
    own = Segments(work.partial, work.lse, work.sequences)
    merge_segments_kernel[(min(batch, programs) if shared is None else batch, rows, width // tile.columns)](
        own,
        own if shared is None else Segments(shared.partial, shared.lse, shared.sequences),
        Shares(work.merges, work.merges) if shared is None else Shares(work.shares, places),
        work.merges, out, out.stride(0), out.stride(1),
        QUERY_LEN=rows // heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        COLUMNS=tile.columns,
        SEGMENTS=tile.segments,
        MEMBERS=0 if shared is None else shared.query_len,
        LATE=work.schedule.late,
        num_warps=tile.warps,
        maxnreg=MERGE_REGISTERS if work.schedule.merge_beside else None,
        **early_launch(out.device),
    )  # fmt: skip


class MergeTile(NamedTuple):
    """Segments of a row that a program reads at once, and how many of the row's columns."""

    segments: int
    columns: int
    warps: int


def merge_tile(programs: int, batch: int, width: int, schedule: DecodeSchedule) -> MergeTile:
    """For `programs` of each lane, of which every sequence has about as many, and rows of `width` columns.

    Programs of the merge take places that the next kernel's could have, so they are one warp each, and read all
    segments in one round where they can: each round takes the time of a read from memory. Where programs stay, and
    linear layers start beside the merge, they take whole rows: tiles of columns were not measured there.
    """
    each = triton.cdiv(programs, batch) + 1
    if schedule.stay_ns:
        segments, warps = (32, 4) if each > 16 else (8, 1)
        return MergeTile(min(segments, warps * _WARP_NUMBERS // width), width, warps)
    segments = min(max(power_of_two(each), 16), _MOST_SEGMENTS)
    numbers = _BESIDE_NUMBERS if schedule.merge_beside else _WARP_NUMBERS
    return MergeTile(segments, min(numbers // segments, width), 1)
