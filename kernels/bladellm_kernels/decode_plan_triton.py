"""The kernel that splits a decode step over programs; `decode_work.py` says how."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.decode_work import power_of_two

_COMPARED = 8192
"""Pairs of a program and a sequence compared at once."""
_LENGTHS = tl.constexpr(4)
"""Lengths of a range that are tried, with and without room for what segments cost."""


@triton.jit(do_not_specialize=["batch", "count", "window"])  # type: ignore[untyped-decorator]
def decode_plan_kernel(
    kv_lens: tl.tensor,
    programs: tl.tensor,
    sequences: tl.tensor,
    merges: tl.tensor,
    batch: tl.tensor,
    count: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SEGMENT: tl.constexpr,
    BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program. count: programs of a KV head; those that get no block have an empty range. SEGMENT: blocks that
    could be read in the time that a segment takes beside its own."""
    sequence = tl.arange(0, BATCH)
    inside = sequence < batch
    kv_len = tl.load(kv_lens + sequence, mask=inside, other=0).to(tl.int32)
    skipped = tl.zeros((BATCH,), tl.int32)
    if WINDOWED:
        skipped = tl.maximum(kv_len - QUERY_LEN + 1 - window, 0) // BLOCK_KV
    blocks = tl.where(kv_len > 0, (kv_len + BLOCK_KV - 1) // BLOCK_KV - skipped, 0)
    ends = tl.cumsum(blocks)
    ranks = tl.cumsum((blocks > 0).to(tl.int32))
    length, room = _best_ranges(ends, ranks, count, SEGMENT, PROGRAMS, CHUNK)
    started = tl.zeros((BATCH,), tl.int32)
    reached = tl.zeros((BATCH,), tl.int32)
    for chunk in range(0, PROGRAMS, CHUNK):
        program = chunk + tl.arange(0, CHUNK)
        known = program < count
        begin, _, _ = _cut(program * length, ends, ranks, length, room, SEGMENT)
        end, _, _ = _cut((program + 1) * length, ends, ranks, length, room, SEGMENT)
        passed = (ends[None, :] <= begin[:, None]) & inside[None, :]
        place = programs + program * 3
        tl.store(place, begin, mask=known)
        tl.store(place + 1, end, mask=known)
        tl.store(place + 2, tl.sum(passed.to(tl.int32), 1), mask=known)
        started += tl.sum(((begin[:, None] <= (ends - blocks)[None, :]) & known[:, None]).to(tl.int32), 0)
        reached += tl.sum(((begin[:, None] < ends[None, :]) & known[:, None]).to(tl.int32), 0)
    segments = tl.where(blocks > 0, reached - started + 1, 0)
    row = sequences + sequence * 5
    tl.store(row, ends - blocks, mask=inside)
    tl.store(row + 1, ends, mask=inside)
    tl.store(row + 2, skipped, mask=inside)
    tl.store(row + 3, started - 1 + sequence, mask=inside)
    tl.store(row + 4, segments, mask=inside)
    merged = inside & (segments != 1)
    tl.store(merges + tl.cumsum(merged.to(tl.int32)), sequence, mask=merged)
    tl.store(merges, tl.sum(merged.to(tl.int32)))


@triton.jit  # type: ignore[untyped-decorator]
def _best_ranges(
    ends: tl.tensor,
    ranks: tl.tensor,
    count: tl.tensor,
    SEGMENT: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tuple:
    """Length of the ranges, and room for each sequence in them beside its blocks, that cost the slowest program least.

    Tried are the shortest lengths, without room and with SEGMENT. That anything has to be merged counts as a block.
    """
    total = tl.max(ends)
    sequences = tl.max(ranks)
    least = total * 0 + 2**30
    length = total * 0 + 1
    room = total * 0
    for choice in range(2 * _LENGTHS):
        tried_room = choice % 2 * SEGMENT
        tried = tl.maximum((total + tried_room * sequences + count - 1) // count, 1) + choice // 2
        cost = total * 0
        split = total * 0
        for chunk in range(0, PROGRAMS, CHUNK):
            program = chunk + tl.arange(0, CHUNK)
            _, first, torn = _cut(program * tried, ends, ranks, tried, tried_room, SEGMENT)
            _, last, _ = _cut((program + 1) * tried, ends, ranks, tried, tried_room, SEGMENT)
            cost = tl.maximum(cost, tl.max(last - first + torn * SEGMENT))
            split = tl.maximum(split, tl.max(torn))
        better = cost + split < least
        least = tl.where(better, cost + split, least)
        length = tl.where(better, tried, length)
        room = tl.where(better, tried_room, room)
    return length, room


@triton.jit  # type: ignore[untyped-decorator]
def _cut(
    place: tl.tensor,
    ends: tl.tensor,
    ranks: tl.tensor,
    length: tl.tensor,
    room: tl.tensor,
    SEGMENT: tl.constexpr,
) -> tl.tuple:
    """Where a cut comes to lie that is wanted at `place`, counting blocks and `room` for each sequence: its block, what
    is before it, counting segments as SEGMENT blocks each, and whether (1, 0) it splits a sequence.

    Close to a sequence's start or end it moves there: the segment saved costs as much as the blocks moved. ranks: of
    each sequence among those that have blocks, from 1 on.
    """
    before = (ends + room * ranks)[None, :] <= place[:, None]
    first = tl.max(tl.where(before, ends[None, :], 0), 1)
    last = tl.min(tl.where(before, 2**30, ends[None, :]), 1)
    rank = tl.max(tl.where(before, ranks[None, :], 0), 1)
    near = tl.minimum(length // 8, SEGMENT)
    offset = place - first - room * (rank + 1)
    split = (offset > near) & (last < 2**30)
    passed = split & (last - first - offset <= near)
    rank += passed.to(tl.int32)
    torn = (split & (passed == 0)).to(tl.int32)
    block = tl.where(passed, last, first) + offset * torn
    return block, block + SEGMENT * (rank + torn), torn


def launch(
    kv_lens: torch.Tensor,
    window: int | None,
    query_len: int,
    block_kv: int,
    segment_blocks: int,
    programs: torch.Tensor,
    sequences: torch.Tensor,
    merges: torch.Tensor,
) -> None:
    """Fill `programs`, `sequences` and `merges` (see `DecodeWork`) for sequences of kv_lens."""
    batch, count = len(sequences), len(programs)
    if batch == 0:
        programs.zero_()
        merges.zero_()
        return
    padded, most = power_of_two(batch), power_of_two(count)
    decode_plan_kernel[(1,)](
        kv_lens, programs, sequences, merges, batch, count, window or 0,
        WINDOWED=window is not None,
        QUERY_LEN=query_len,
        BLOCK_KV=block_kv,
        SEGMENT=segment_blocks,
        BATCH=padded,
        PROGRAMS=most,
        CHUNK=min(most, max(_COMPARED // padded, 1)),
        num_warps=8,
    )  # fmt: skip
