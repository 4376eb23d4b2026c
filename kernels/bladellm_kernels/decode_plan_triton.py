"""The kernel that splits a decode step over programs; `decode_work.py` says how."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.power_of_two import power_of_two

_LENGTHS = tl.constexpr(4)
"""Lengths of a range that are tried, with and without room for what segments cost."""
_MOST = tl.constexpr(2**30)


class Table(NamedTuple):
    """What cuts are found by, in memory: of every sequence the end of its blocks in the count over the batch, and how
    many sequences up to it have blocks; FIELDS of another apart."""

    ends: Any
    ranks: Any
    batch: Any


@triton.jit(do_not_specialize=["batch", "count", "window"])  # type: ignore[untyped-decorator]
def decode_plan_kernel(
    kv_lens: tl.tensor,
    shares: tl.tensor,
    programs: tl.tensor,
    sequences: tl.tensor,
    merges: tl.tensor,
    empties: tl.tensor,
    batch: tl.tensor,
    count: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
    SHARES: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    SEGMENT: tl.constexpr,
    BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program. count: programs of a KV head; those that get no block have an empty range. SEGMENT: blocks that
    could be read in the time that a segment takes beside its own. EARLY: it runs beside the kernels before it."""
    let_next_start(EARLY)
    sequence = tl.arange(0, BATCH)
    inside = sequence < batch
    kv_len = tl.load(kv_lens + sequence, mask=inside, other=0).to(tl.int32)
    skipped = tl.zeros((BATCH,), tl.int32)
    if WINDOWED:
        skipped = tl.maximum(kv_len - QUERY_LEN + 1 - window, 0) // BLOCK_KV
    if SHARES:
        skipped = tl.load(shares + sequence, mask=inside, other=0).to(tl.int32) // BLOCK_KV
    blocks = tl.where(kv_len > 0, (kv_len + BLOCK_KV - 1) // BLOCK_KV - skipped, 0)
    ends = tl.cumsum(blocks)
    ranks = tl.cumsum((blocks > 0).to(tl.int32))
    row = sequences + sequence * 5
    tl.store(row, ends - blocks, mask=inside)
    tl.store(row + 1, ends, mask=inside)
    tl.store(row + 2, skipped, mask=inside)
    # Here until the number of the first segment is known.
    tl.store(row + 3, ranks, mask=inside)
    tl.debug_barrier()
    table = Table(sequences + 1, sequences + 3, batch)
    length, rest, room, near = _best_ranges(table, tl.max(ends), tl.max(ranks), count, SEGMENT, BATCH, PROGRAMS)
    program = tl.arange(0, PROGRAMS)
    begin, _, _ = _cut(program * length + tl.minimum(program, rest), table, room, near, SEGMENT, BATCH)
    end, _, _ = _cut((program + 1) * length + tl.minimum(program + 1, rest), table, room, near, SEGMENT, BATCH)
    place = programs + program * 3
    tl.store(place, begin, mask=program < count)
    tl.store(place + 1, end, mask=program < count)
    tl.store(place + 2, _passed(table.ends, table.ranks, 0, batch, begin, 5, BATCH), mask=program < count)
    tl.debug_barrier()
    started = _passed(programs, programs, 0, count, ends - blocks, 3, PROGRAMS)
    reached = _passed(programs, programs, 0, count, ends - 1, 3, PROGRAMS)
    segments = tl.where(blocks > 0, reached - started + 1, 0)
    tl.store(row + 3, started - 1 + sequence, mask=inside)
    tl.store(row + 4, segments, mask=inside)
    _list(merges, sequence, inside & ((segments != 1) | (SHARES & (skipped > 0))))
    _list(empties, sequence, inside & (segments == 0))
    # Whoever ends says that the kernels before it have ended, too.
    wait_for_inputs(EARLY)


@triton.jit  # type: ignore[untyped-decorator]
def _list(place: tl.tensor, sequence: tl.tensor, wanted: tl.tensor) -> None:
    """How many are wanted, and which."""
    tl.store(place + tl.cumsum(wanted.to(tl.int32)), sequence, mask=wanted)
    tl.store(place, tl.sum(wanted.to(tl.int32)))


@triton.jit  # type: ignore[untyped-decorator]
def _best_ranges(
    table: tl.tuple,
    total: tl.tensor,
    sequences: tl.tensor,
    count: tl.tensor,
    SEGMENT: tl.constexpr,
    BATCH: tl.constexpr,
    PROGRAMS: tl.constexpr,
) -> tl.tuple:
    """Length of the ranges, how many of the first ones have one more, room for each sequence in them beside its blocks,
    and how far cuts may move, that cost the slowest program least.

    Tried are equal ranges first, then the shortest lengths, without room and with SEGMENT. That anything has to be
    merged counts as a block. Equal ranges differ by a block, the longer ones first, as their programs begin first: were
    all but the last of one length, that one would end long before the others.
    """
    choice = tl.arange(0, 2 * _LENGTHS)
    room = choice % 2 * SEGMENT
    length = tl.maximum((total + room * sequences + count - 1) // count, 1) + choice // 2
    # Ranges of no block are the last ones.
    even = (choice == 0) & (total >= count)
    rest = tl.where(even, total % count, 0)
    length = tl.where(even, total // count, length)
    near = tl.where(choice == 0, 0, tl.minimum(length // 8, SEGMENT))
    program = tl.arange(0, PROGRAMS)[None, :]
    begin = program * length[:, None] + tl.minimum(program, rest[:, None])
    end = (program + 1) * length[:, None] + tl.minimum(program + 1, rest[:, None])
    _, first, torn = _cut(begin, table, room[:, None], near[:, None], SEGMENT, BATCH)
    _, last, _ = _cut(end, table, room[:, None], near[:, None], SEGMENT, BATCH)
    cost = tl.max(last - first + torn * SEGMENT, 1) + tl.max(torn, 1)
    best = choice == tl.min(cost * (2 * _LENGTHS) + choice) % (2 * _LENGTHS)
    return (
        tl.sum(tl.where(best, length, 0)), tl.sum(tl.where(best, rest, 0)),
        tl.sum(tl.where(best, room, 0)), tl.sum(tl.where(best, near, 0)),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _cut(
    place: tl.tensor,
    table: tl.tuple,
    room: tl.tensor,
    near: tl.tensor,
    SEGMENT: tl.constexpr,
    BATCH: tl.constexpr,
) -> tl.tuple:
    """Where cuts come to lie that are wanted at `place`, counting blocks and `room` for each sequence: the block, what
    is before it, counting segments as SEGMENT blocks each, and whether (1, 0) it splits a sequence.

    A cut no more than `near` blocks from a sequence's start or end moves there: that saves a segment.
    """
    sequence = _passed(table.ends, table.ranks, room, table.batch, place, 5, BATCH)
    first = tl.load(table.ends + (sequence - 1) * 5, mask=sequence > 0, other=0)
    rank = tl.load(table.ranks + (sequence - 1) * 5, mask=sequence > 0, other=0)
    last = tl.load(table.ends + sequence * 5, mask=sequence < table.batch, other=0)
    offset = place - first - room * (rank + 1)
    split = (offset > near) & (sequence < table.batch)
    passed = split & (last - first - offset <= near)
    rank += passed.to(tl.int32)
    torn = (split & (passed == 0)).to(tl.int32)
    block = tl.where(passed, last, first) + offset * torn
    return block, block + SEGMENT * (rank + torn), torn


@triton.jit  # type: ignore[untyped-decorator]
def _passed(
    numbers: tl.tensor,
    ranks: tl.tensor,
    room: tl.tensor,
    count: tl.tensor,
    place: tl.tensor,
    FIELDS: tl.constexpr,
    MOST: tl.constexpr,
) -> tl.tensor:
    """How many of `count` ascending sums, numbers + room · ranks, FIELDS apart each, are not above `place`. MOST: a
    power of two not below count."""
    passed = place * 0
    # A loop, not unrolled: that takes seven times as long to compile, for each kind of batch.
    half = count * 0 + MOST
    while half >= 1:
        tried = passed + half - 1
        known = tried < count
        number = tl.load(numbers + tried * FIELDS, mask=known, other=_MOST)
        rank = tl.load(ranks + tried * FIELDS, mask=known, other=0)
        passed = tl.where(number + room * rank <= place, tried + 1, passed)
        half //= 2
    return passed


def launch(
    kv_lens: torch.Tensor,
    shares: torch.Tensor | None,
    window: int | None,
    query_len: int,
    schedule: DecodeSchedule,
    programs: torch.Tensor,
    sequences: torch.Tensor,
    merges: torch.Tensor,
    empties: torch.Tensor,
    settled: bool = False,
) -> None:
    """Fill `programs`, `sequences`, `merges` and `empties` (see `DecodeWork`) for sequences of kv_lens; shares:
    tokens of each that are not read with it, or None. settled: as of `DecodeWorkspace.fill`."""
    batch, count = len(sequences), len(programs)
    if batch == 0:
        programs.zero_()
        merges.zero_()
        empties.zero_()
        return
    decode_plan_kernel[(1,)](
        kv_lens, kv_lens if shares is None else shares, programs, sequences, merges, empties, batch, count,
        window or 0,
        WINDOWED=window is not None,
        SHARES=shares is not None,
        QUERY_LEN=query_len,
        BLOCK_KV=schedule.block_kv,
        SEGMENT=schedule.segment_blocks,
        BATCH=power_of_two(batch),
        PROGRAMS=power_of_two(count),
        num_warps=8,
        **(early_launch(kv_lens.device) if settled else {"EARLY": False}),
    )  # fmt: skip
