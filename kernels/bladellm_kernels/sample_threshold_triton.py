"""Where a row's filters cut, without a sort: two histograms of the distance to the best token, the second of a few bins
of the first, leave a range of bins that the last kept token is in. `sample_finish_triton` finds it among their tokens.

Bins are counted; how much mass lies before each is known between bounds, from the distances where it begins and ends,
and from the exact mass of the whole. A token's bin grows with its distance and depends on nothing else: which tokens
lie before the range is exact, whatever the bounds. Tokens of logit -inf have neither bin nor mass.
"""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.sample_rows_triton import (
    BEFORE,
    BINS,
    INSIDE,
    SUMS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_COLUMN,
    TOTAL,
    has_changes,
    is_ordered,
    load_logits,
    mass_limit,
    mass_of,
    row_peak,
    shift,
)

_PER_UNIT = tl.constexpr(8.0)
"""Bins of the first histogram in a distance of 1: the last bin, from 31.9 on, has no mass."""

_NO_MASS = tl.constexpr(28.0)
"""Distance from which a mass is less than its unit."""

_UNITS = tl.constexpr(2.0**40)
_SLACK = tl.constexpr(2.0**-13)
"""Of the bounds: above the rounding of distances and exponentials."""


@triton.jit  # type: ignore[untyped-decorator]
def histogram_kernel(rows: tl.tuple, slots: tl.tuple, work: tl.tuple, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """Program (i, r) counts the i-th part of row r into the row's first histogram, and sums its mass."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot >= 0:
        flags = tl.load(slots.flags + slot)
        peak, _, finite = row_peak(work, row)
        if is_ordered(flags) & finite:
            temperature = tl.load(slots.floats + slot * 6 + TEMPERATURE)
            scale = bin_scale(flags, temperature)
            changed = has_changes(rows, row, flags)
            counts = tl.zeros((BINS,), tl.int32)
            mass = slot * 0
            first = part * work.chunk
            for start in range(first, tl.minimum(first + work.chunk, rows.vocab), BLOCK):
                logits = load_logits(rows, work, row, start + tl.arange(0, BLOCK), changed)
                shifted = shift(logits, peak, temperature)
                counts += tl.histogram(bin_of(shifted, scale), BINS, mask=logits > float("-inf"))
                if (flags & TOP_P) != 0:
                    mass += tl.sum(mass_of(shifted), 0)
            _add_counts(work.histograms + row * 2 * BINS, counts)
            tl.atomic_add(work.sums + row * SUMS + TOTAL, mass, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def refine_kernel(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program (i, r) divides the bins that row r is cut in, for its i-th part, unless their tokens are few."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot >= 0:
        flags = tl.load(slots.flags + slot)
        peak, _, finite = row_peak(work, row)
        if is_ordered(flags) & finite:
            temperature = tl.load(slots.floats + slot * 6 + TEMPERATURE)
            scale = bin_scale(flags, temperature)
            begin, end, _passed, tokens = first_range(slots, work, row, slot, flags, scale)
            if tokens > CAPACITY:
                changed = has_changes(rows, row, flags)
                counts = tl.zeros((BINS,), tl.int32)
                before = slot * 0
                inside = slot * 0
                first = part * work.chunk
                for start in range(first, tl.minimum(first + work.chunk, rows.vocab), BLOCK):
                    logits = load_logits(rows, work, row, start + tl.arange(0, BLOCK), changed)
                    shifted = shift(logits, peak, temperature)
                    bins = bin_of(shifted, scale)
                    within = (bins >= begin) & (bins < end) & (logits > float("-inf"))
                    counts += tl.histogram(fine_bin_of(shifted, scale, begin, end), BINS, mask=within)
                    if (flags & TOP_P) != 0:
                        mass = mass_of(shifted)
                        before += tl.sum(tl.where(bins < begin, mass, 0), 0)
                        inside += tl.sum(tl.where(within, mass, 0), 0)
                _add_counts(work.histograms + row * 2 * BINS + BINS, counts)
                tl.atomic_add(work.sums + row * SUMS + BEFORE, before, sem="relaxed")
                tl.atomic_add(work.sums + row * SUMS + INSIDE, inside, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def bin_scale(flags: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Bins in a distance of 1. With a top-k in a distance of the logits: a low temperature moves no token to the last
    bin, whose end is unknown."""
    return tl.where((flags & TOP_K) != 0, _PER_UNIT * temperature, _PER_UNIT)


@triton.jit  # type: ignore[untyped-decorator]
def bin_of(shifted: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Bin in the first histogram."""
    return tl.minimum(-shifted * scale, BINS - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def fine_bin_of(shifted: tl.tensor, scale: tl.tensor, begin: tl.tensor, end: tl.tensor) -> tl.tensor:
    """Bin in the second histogram, of a token in bins [begin, end) of the first."""
    place = (-shifted * scale - begin.to(tl.float32)) * tl.math.div_rn(BINS * 1.0, (end - begin).to(tl.float32))
    return tl.minimum(tl.maximum(place, 0.0), BINS - 1.0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def first_range(
    slots: tl.tuple, work: tl.tuple, row: tl.tensor, slot: tl.tensor, flags: tl.tensor, scale: tl.tensor
) -> tl.tensor:
    """Bins [begin, end) of the first histogram that hold the last kept token; tokens before them, and in them."""
    counts = tl.load(work.histograms + row * 2 * BINS + tl.arange(0, BINS)).to(tl.int64)
    total = tl.load(work.sums + row * SUMS + TOTAL)
    zero = total * 0
    return _range(slots, slot, flags, counts, 0.0, tl.math.div_rn(1.0, scale), zero, zero, total, total)


@triton.jit  # type: ignore[untyped-decorator]
def second_range(
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    scale: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
) -> tl.tensor:
    """The same of the second histogram, which divides bins [begin, end) of the first."""
    coarse = tl.load(work.histograms + row * 2 * BINS + tl.arange(0, BINS)).to(tl.int64)
    passed = tl.sum(tl.where(tl.arange(0, BINS) < begin, coarse, 0), 0)
    counts = tl.load(work.histograms + row * 2 * BINS + BINS + tl.arange(0, BINS)).to(tl.int64)
    sums = work.sums + row * SUMS
    width = tl.math.div_rn((end - begin).to(tl.float32), BINS * scale)
    return _range(
        slots, slot, flags, counts, tl.math.div_rn(begin.to(tl.float32), scale), width, passed,
        tl.load(sums + BEFORE), tl.load(sums + INSIDE), tl.load(sums + TOTAL),
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _range(
    slots: tl.tuple,
    slot: tl.tensor,
    flags: tl.tensor,
    counts: tl.tensor,
    origin: tl.tensor,
    width: tl.tensor,
    passed: tl.tensor,
    before: tl.tensor,
    inside: tl.tensor,
    total: tl.tensor,
) -> tl.tensor:
    """Which bins hold the last kept token, of a histogram whose bins begin at distance `origin` and are `width` wide.

    passed, before: tokens and mass ahead of the histogram. inside, total: mass in it, and of the row.
    """
    bins = tl.arange(0, BINS)
    ends = tl.cumsum(counts, 0)
    k = tl.minimum(tl.load(slots.top_ks + slot) - passed, tl.sum(counts, 0))
    last = tl.sum((ends < k).to(tl.int32), 0)
    begin = last
    if (flags & TOP_P) != 0:
        top_p = tl.load(slots.floats + slot * 6 + TOP_P_COLUMN)
        lower, upper = _mass_bounds(counts, origin, width)
        low, high = tl.cumsum(lower * counts, 0), tl.cumsum(upper * counts, 0)
        if (flags & TOP_K) != 0:
            # The mass of the first k tokens is known between bounds, too: whatever it is, p of it is not less.
            at = bins == last
            held = tl.sum(tl.where(at, low - (ends - k) * lower, 0), 0)
            limit = mass_limit(before + held, top_p) - before
            begin = tl.sum((high < limit).to(tl.int32), 0)
        else:
            limit = mass_limit(total, top_p) - before
            behind_low, behind_high = tl.sum(lower * counts, 0) - low, tl.sum(upper * counts, 0) - high
            begin = tl.sum((tl.minimum(high, inside - behind_low) < limit).to(tl.int32), 0)
            last = tl.minimum(last, tl.sum((tl.maximum(low, inside - behind_high) < limit).to(tl.int32), 0))
        begin = tl.minimum(begin, last)
    skipped = tl.sum(tl.where(bins < begin, counts, 0), 0)
    return begin, last + 1, passed + skipped, tl.sum(tl.where(bins <= last, counts, 0), 0) - skipped


@triton.jit  # type: ignore[untyped-decorator]
def _mass_bounds(counts: tl.tensor, origin: tl.tensor, width: tl.tensor) -> tl.tensor:
    """The least and the largest mass of a token of each bin: int64."""
    bins = tl.arange(0, BINS)
    near = origin + bins.to(tl.float32) * width
    upper = (tl.exp(-near) * ((1.0 + _SLACK) * _UNITS)).to(tl.int64) + 1
    lower = (tl.exp(-near - width) * ((1.0 - _SLACK) * _UNITS)).to(tl.int64) - 1
    # The last bin has no end where it takes all that is further away.
    lower = tl.where(bins == BINS - 1, 0, tl.maximum(lower, 0))
    return lower, tl.where(near < _NO_MASS, upper, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _add_counts(histogram: tl.tensor, counts: tl.tensor) -> None:
    bins = tl.arange(0, BINS)
    tl.atomic_add(histogram + bins, counts, mask=counts > 0, sem="relaxed")
