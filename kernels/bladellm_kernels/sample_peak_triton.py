"""The first kernel of `sample_step`: penalties, bias and masks, and the highest logit of each row."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.sample_rows_triton import (
    BIASED,
    BINS,
    FREQUENCY,
    PARTS,
    PENALISED,
    PRESENCE,
    REPETITION,
    SUMS,
    has_changes,
    load_logits,
    mask_row_of,
)

_BIASES = tl.constexpr(128)
"""Bias entries of a slot that are compared at once."""


@triton.jit  # type: ignore[untyped-decorator]
def peak_kernel(
    rows: tl.tuple, slots: tl.tuple, work: tl.tuple, ORDERED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
) -> None:
    """Program (i, r) looks at the i-th part of row r, and the first one clears what later kernels add to."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    part, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(rows.slots + row)
    if slot >= 0:
        flags = tl.load(slots.flags + slot)
        first = part * work.chunk
        last = tl.minimum(first + work.chunk, rows.vocab)
        changed = has_changes(rows, row, flags)
        if changed:
            _change(rows, slots, work, row, slot, flags, first, last, BLOCK)
        best = tl.full((BLOCK,), float("-inf"), tl.float32)
        tokens = first + tl.arange(0, BLOCK)
        nans = tl.zeros((BLOCK,), tl.int32)
        for start in range(first, last, BLOCK):
            token = start + tl.arange(0, BLOCK)
            logits = load_logits(rows, work, row, token, changed)
            nans = nans | (logits != logits).to(tl.int32)
            better = logits > best
            best = tl.where(better, logits, best)
            tokens = tl.where(better, token, tokens)
        peak = tl.max(best, 0)
        lowest = tl.min(tl.where(best == peak, tokens, 0x7FFFFFFF), 0)
        # A row with a NaN is as invalid as one with +inf, which needs no care in comparisons.
        peak = tl.where(tl.max(nans, 0) > 0, float("inf"), peak)
        tl.store(work.peaks + row * PARTS + part, peak)
        tl.store(work.peak_tokens + row * PARTS + part, lowest)
        if ORDERED and part == 0:
            cells = tl.arange(0, 2 * BINS)
            tl.store(work.histograms + row * 2 * BINS + cells, tl.zeros((2 * BINS,), tl.int32))
            tl.store(work.sums + row * SUMS + tl.arange(0, SUMS), tl.zeros((SUMS,), tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _change(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write tokens [first, last) of the row into `work.changed`, every change made."""
    changed = work.changed + row.to(tl.int64) * rows.vocab
    mask_row = mask_row_of(rows, row)
    for start in range(first, last, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < rows.vocab
        logits = tl.load(rows.logits + row.to(tl.int64) * rows.stride + token, mask=inside, other=0.0).to(tl.float32)
        if (flags & PENALISED) != 0:
            logits = _penalised(logits, slots, slot, rows.vocab, token, inside)
        if rows.mask_rows is not None and mask_row >= 0:
            words = rows.masks + mask_row.to(tl.int64) * rows.words
            allowed = (tl.load(words + token // 32, mask=inside, other=0) >> (token % 32)) & 1
            logits = logits + tl.where(allowed == 1, 0.0, float("-inf"))
        tl.store(changed + token, logits, mask=inside)
    if (flags & BIASED) != 0:
        always = tl.load(slots.bias_counts + slot * 2)
        held = tl.load(slots.bias_counts + slot * 2 + 1)
        # A program reads again, in other threads, what it wrote: each barrier lets it see that.
        tl.debug_barrier()
        _add_bias(changed, slots, slot, 0, always, first, last)
        if tl.load(rows.positions + row) < tl.load(slots.free_from + slot):
            tl.debug_barrier()
            _add_bias(changed, slots, slot, always, always + held, first, last)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _penalised(
    logits: tl.tensor, slots: tl.tuple, slot: tl.tensor, vocab: tl.tensor, token: tl.tensor, inside: tl.tensor
) -> tl.tensor:
    """See `penalties`; the same roundings in the same order."""
    floats = slots.floats + slot * 6
    seen = tl.load(slots.seen + slot * vocab + token, mask=inside, other=0)
    counts = tl.load(slots.counts + slot * vocab + token, mask=inside, other=0)
    factor = tl.where(seen != 0, tl.load(floats + REPETITION), 1.0)
    result = tl.where(logits > 0, tl.math.div_rn(logits, factor), logits * factor)
    result = result - counts.to(tl.float32) * tl.load(floats + FREQUENCY)
    return result - tl.where(counts > 0, tl.load(floats + PRESENCE), 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _add_bias(
    changed: tl.tensor,
    slots: tl.tuple,
    slot: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
) -> None:
    """Add the slot's entries [begin, end) to those of its tokens in [first, last)."""
    for start in range(begin, end, _BIASES):
        entry = start + tl.arange(0, _BIASES)
        token = tl.load(slots.bias_tokens + slot * slots.biases + entry, mask=entry < end, other=-1)
        value = tl.load(slots.bias_values + slot * slots.biases + entry, mask=entry < end, other=0.0)
        here = (token >= first) & (token < last)
        tl.store(changed + token, tl.load(changed + token, mask=here, other=0.0) + value, mask=here)
