"""The Gumbel-max draw of `sample_step` among the tokens that every filter keeps, and the list of those in doubt."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.gumbel_triton import negative_uniforms, noisy, noisy_bound, row_keys
from bladellm_kernels.sample_rows_triton import (
    CANDIDATES,
    KEPT,
    KEPT_COUNT,
    MIN_P_COLUMN,
    PARTS,
    RANDOM,
    SUMS,
    TEMPERATURE,
    TOP_P,
    WIDE,
    has_changes,
    is_ordered,
    load_logits,
    log_of,
    mass_of,
    row_peak,
    shift,
)
from bladellm_kernels.sample_threshold_triton import bin_of, bin_scale, fine_bin_of, first_range, second_range

NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit  # type: ignore[untyped-decorator]
def draw_kernel(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    ORDERED: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (i, r) draws among the i-th part of row r. ORDERED: rows may have top-k or top-p."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot >= 0:
        flags = tl.load(slots.flags + slot)
        peak, _, finite = row_peak(work, row)
        if ((flags & RANDOM) != 0) & finite:
            if ORDERED:
                if is_ordered(flags):
                    _draw_ordered(rows, slots, work, row, part, slot, flags, peak, CAPACITY, BLOCK)
                else:
                    _draw_plain(rows, slots, work, row, part, slot, flags, peak, BLOCK)
            else:
                _draw_plain(rows, slots, work, row, part, slot, flags, peak, BLOCK)


@triton.jit  # type: ignore[untyped-decorator]
def draw_from(
    shifted: tl.tensor,
    token: tl.tensor,
    kept: tl.tensor,
    key_0: tl.tensor,
    key_1: tl.tensor,
    best: tl.tensor,
    drawn: tl.tensor,
) -> tl.tensor:
    """The best score so far and its token, after some more tokens: the lowest of equals if tokens come in order."""
    negative = negative_uniforms(token, key_0, key_1)
    bound = tl.max(tl.where(kept, noisy_bound(shifted, negative), float("-inf")), 0)
    # Logarithms only where they can matter: in about one block of a row after the first few.
    if (bound >= best) & (bound > float("-inf")):
        scores = tl.where(kept, noisy(shifted, negative), float("-inf"))
        highest = tl.max(scores, 0)
        lowest = tl.min(tl.where(kept & (scores == highest), token, NO_TOKEN), 0)
        if highest > best:
            best = highest
            drawn = lowest
    return best, drawn


@triton.jit  # type: ignore[untyped-decorator]
def _draw_plain(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    part: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    peak: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Every token but for min-p."""
    temperature = tl.load(slots.floats + slot * 6 + TEMPERATURE)
    least = log_of(tl.load(slots.floats + slot * 6 + MIN_P_COLUMN))
    key_0, key_1 = row_keys(slots.streams, slot, tl.load(rows.positions + row))
    changed = has_changes(rows, row, flags)
    best, drawn = tl.full((), float("-inf"), tl.float32), part * 0 + NO_TOKEN
    first = part * work.chunk
    for start in range(first, tl.minimum(first + work.chunk, rows.vocab), BLOCK):
        token = start + tl.arange(0, BLOCK)
        shifted = shift(load_logits(rows, work, row, token, changed), peak, temperature)
        best, drawn = draw_from(shifted, token, shifted >= least, key_0, key_1, best, drawn)
    tl.store(work.scores + row * PARTS + part, best)
    tl.store(work.score_tokens + row * PARTS + part, drawn)


@triton.jit  # type: ignore[untyped-decorator]
def _draw_ordered(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    part: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    peak: tl.tensor,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Tokens that are kept for certain; those that may be kept become candidates, unless they are too many."""
    temperature = tl.load(slots.floats + slot * 6 + TEMPERATURE)
    scale = bin_scale(flags, temperature)
    sums = work.sums + row * SUMS
    begin, end, passed, doubtful = first_range(slots, work, row, slot, flags, scale)
    refined = doubtful > CAPACITY
    fine_begin, fine_end = begin * 0, begin * 0
    if refined:
        fine_begin, fine_end, passed, doubtful = second_range(slots, work, row, slot, flags, scale, begin, end)
    if part == 0:
        tl.store(sums + KEPT_COUNT, passed)
        tl.store(sums + WIDE, (doubtful > CAPACITY).to(tl.int64))
    best, drawn = tl.full((), float("-inf"), tl.float32), part * 0 + NO_TOKEN
    if doubtful <= CAPACITY:
        least = log_of(tl.load(slots.floats + slot * 6 + MIN_P_COLUMN))
        key_0, key_1 = row_keys(slots.streams, slot, tl.load(rows.positions + row))
        changed = has_changes(rows, row, flags)
        mass = slot * 0
        first = part * work.chunk
        for start in range(first, tl.minimum(first + work.chunk, rows.vocab), BLOCK):
            token = start + tl.arange(0, BLOCK)
            shifted = shift(load_logits(rows, work, row, token, changed), peak, temperature)
            bins = bin_of(shifted, scale)
            kept = bins < begin
            doubt = (bins >= begin) & (bins < end) & (shifted > float("-inf"))
            if refined:
                fine = fine_bin_of(shifted, scale, begin, end)
                kept = kept | (doubt & (fine < fine_begin))
                doubt = doubt & (fine >= fine_begin) & (fine < fine_end)
            both = tl.max(kept.to(tl.int32) + doubt.to(tl.int32) * 2, 0)
            if both > 0:
                if (flags & TOP_P) != 0:
                    mass += tl.sum(tl.where(kept, mass_of(shifted), 0), 0)
                best, drawn = draw_from(shifted, token, kept & (shifted >= least), key_0, key_1, best, drawn)
                if both > 1:
                    _append(work.candidates + row.to(tl.int64) * CAPACITY, sums, shifted, token, doubt, CAPACITY)
        tl.atomic_add(sums + KEPT, mass, sem="relaxed")
    tl.store(work.scores + row * PARTS + part, best)
    tl.store(work.score_tokens + row * PARTS + part, drawn)


@triton.jit  # type: ignore[untyped-decorator]
def _append(
    candidates: tl.tensor,
    sums: tl.tensor,
    shifted: tl.tensor,
    token: tl.tensor,
    chosen: tl.tensor,
    CAPACITY: tl.constexpr,
) -> None:
    """Add tokens to the row's candidates, in any order. The distance is above the token: keys sort like tokens."""
    one = chosen.to(tl.int32)
    place = tl.atomic_add(sums + CANDIDATES, tl.sum(one, 0).to(tl.int64), sem="relaxed")
    place = place + (tl.cumsum(one, 0) - one)
    key = ((shifted.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 32) | token.to(tl.int64)
    tl.store(candidates + place, key, mask=chosen & (place < CAPACITY))
