"""The last kernel of `sample_step`: a program a row puts its parts together, finds the exact cut among the candidates,
and writes the token wherever the next step reads it."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.gumbel_triton import row_keys
from bladellm_kernels.penalties import MAX_COUNT
from bladellm_kernels.sample_draw_triton import NO_TOKEN, draw_from
from bladellm_kernels.sample_rows_triton import (
    CANDIDATES,
    KEPT,
    KEPT_COUNT,
    MIN_P_COLUMN,
    PARTS,
    PENALISED,
    RANDOM,
    SUMS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_COLUMN,
    TOTAL,
    WIDE,
    has_changes,
    is_ordered,
    load_logits,
    log_of,
    mass_limit,
    mass_of,
    row_peak,
    shift,
)

_MAX_COUNT = tl.constexpr(MAX_COUNT)
_NO_KEY = tl.constexpr(0x7FFFFFFFFFFFFFFF)
"""Above the key of every token."""


@triton.jit  # type: ignore[untyped-decorator]
def finish_kernel(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    tokens: tl.tensor,
    feedback: tl.tensor,
    last_token: tl.tensor,
    DRAWN: tl.constexpr,
    ORDERED: tl.constexpr,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program r writes row r. DRAWN: rows may be random; ORDERED: they may have top-k or top-p. FEW: candidates that
    most rows have no more than."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    slot = tl.load(rows.slots + row)
    token = row * 0 - 1
    if slot >= 0:
        flags = tl.load(slots.flags + slot)
        peak, token, finite = row_peak(work, row)
        if finite:
            if DRAWN and (flags & RANDOM) != 0:
                best, token = _merge_parts(work, row)
                if ORDERED and is_ordered(flags):
                    token = _draw_cut(rows, slots, work, row, slot, flags, peak, best, token, CAPACITY, FEW, BLOCK)
        else:
            token = token * 0 - 1
        _hand_on(slots, slot, flags, tl.maximum(token, 0), rows.vocab, last_token)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(feedback + row, tl.maximum(token, 0).to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _hand_on(
    slots: tl.tuple, slot: tl.tensor, flags: tl.tensor, token: tl.tensor, vocab: tl.tensor, last_token: tl.tensor
) -> None:
    """The token for the next step and for the statistics of a penalised slot."""
    if last_token is not None:
        tl.store(last_token + slot, token.to(tl.int64))
    if (flags & PENALISED) != 0:
        place = slot * vocab + token
        count = tl.load(slots.counts + place).to(tl.int32)
        tl.store(slots.counts + place, tl.minimum(count + 1, _MAX_COUNT).to(tl.int16))
        tl.store(slots.seen + place, (count * 0 + 1).to(tl.uint8))


@triton.jit  # type: ignore[untyped-decorator]
def _merge_parts(work: tl.tuple, row: tl.tensor) -> tl.tensor:
    part = tl.arange(0, PARTS)
    scores = tl.load(work.scores + row * PARTS + part, mask=part < work.parts, other=float("-inf"))
    tokens = tl.load(work.score_tokens + row * PARTS + part, mask=part < work.parts, other=NO_TOKEN)
    best = tl.max(scores, 0)
    return best, tl.min(tl.where(scores == best, tokens, NO_TOKEN), 0)


@triton.jit  # type: ignore[untyped-decorator]
def _draw_cut(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    peak: tl.tensor,
    best: tl.tensor,
    token: tl.tensor,
    CAPACITY: tl.constexpr,
    FEW: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token of a row with top-k or top-p, from the best of those kept for certain and the candidates."""
    sums = work.sums + row * SUMS
    count = tl.load(sums + CANDIDATES)
    if tl.load(sums + WIDE) != 0:
        token = _draw_wide(rows, slots, work, row, slot, flags, peak, BLOCK)
    elif count <= FEW:
        token = _draw_candidates(rows, slots, work, row, slot, flags, best, token, count, CAPACITY, FEW)
    else:
        token = _draw_candidates(rows, slots, work, row, slot, flags, best, token, count, CAPACITY, CAPACITY)
    return token


@triton.jit  # type: ignore[untyped-decorator]
def _draw_candidates(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    best: tl.tensor,
    token: tl.tensor,
    count: tl.tensor,
    CAPACITY: tl.constexpr,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The same, of at most SIZE candidates."""
    place = tl.arange(0, SIZE)
    keys = tl.load(work.candidates + row.to(tl.int64) * CAPACITY + place, mask=place < count, other=_NO_KEY)
    sums = work.sums + row * SUMS
    cut = tl.max(tl.where(place < count, keys, 0), 0)
    if (flags & TOP_K) != 0:
        k = tl.load(slots.top_ks + slot) - tl.load(sums + KEPT_COUNT)
        if k < count:
            cut = _cut(keys, (place < count).to(tl.int64), k, cut)
    shifted = -((keys >> 32).to(tl.int32).to(tl.float32, bitcast=True))
    if (flags & TOP_P) != 0:
        mass = tl.where((place < count) & (keys <= cut), mass_of(shifted), 0)
        kept = tl.load(sums + KEPT)
        total = tl.load(sums + TOTAL)
        if (flags & TOP_K) != 0:
            total = kept + tl.sum(mass, 0)
        cut = _cut(keys, mass, mass_limit(total, tl.load(slots.floats + slot * 6 + TOP_P_COLUMN)) - kept, cut)
    least = log_of(tl.load(slots.floats + slot * 6 + MIN_P_COLUMN))
    inside = (place < count) & (keys <= cut) & (shifted >= least)
    key_0, key_1 = row_keys(slots.streams, slot, tl.load(rows.positions + row))
    low = tl.full((), float("-inf"), tl.float32)
    highest, drawn = draw_from(shifted, keys.to(tl.int32), inside, key_0, key_1, low, token * 0 + NO_TOKEN)
    # Candidates have no order: of equal scores the lowest token counts, as it does between parts.
    if (highest > best) | ((highest == best) & (drawn < token)):
        token = drawn
    return token


@triton.jit  # type: ignore[untyped-decorator]
def _cut(keys: tl.tensor, weights: tl.tensor, target: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The lowest key up to which the weights reach `target`; `last`, which none kept is above, if they never do."""
    low = tl.min(keys, 0)
    high = last
    while low < high:
        middle = low + (high - low) // 2
        if tl.sum(tl.where(keys <= middle, weights, 0), 0) >= target:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _draw_wide(
    rows: tl.tuple,
    slots: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    slot: tl.tensor,
    flags: tl.tensor,
    peak: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token of a row with too many tokens in doubt, as where thousands are equal: by many passes over it."""
    temperature = tl.load(slots.floats + slot * 6 + TEMPERATURE)
    changed = has_changes(rows, row, flags)
    # -inf is the last distance that has tokens to count.
    cut = (slot * 0 + 0x7F800000) << 32
    if (flags & TOP_K) != 0:
        k = tl.load(slots.top_ks + slot).to(tl.int64)
        cut = _cut_of_row(rows, work, row, peak, temperature, changed, k, cut, False, BLOCK)
    if (flags & TOP_P) != 0:
        total = _weight_of_row(rows, work, row, peak, temperature, changed, cut, cut, True, BLOCK)
        limit = mass_limit(total, tl.load(slots.floats + slot * 6 + TOP_P_COLUMN))
        cut = _cut_of_row(rows, work, row, peak, temperature, changed, limit, cut, True, BLOCK)
    least = log_of(tl.load(slots.floats + slot * 6 + MIN_P_COLUMN))
    key_0, key_1 = row_keys(slots.streams, slot, tl.load(rows.positions + row))
    best, drawn = tl.full((), float("-inf"), tl.float32), row * 0 + NO_TOKEN
    for start in range(0, rows.vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        shifted = shift(load_logits(rows, work, row, token, changed), peak, temperature)
        kept = (_key(shifted, token) <= cut) & (shifted >= least)
        best, drawn = draw_from(shifted, token, kept, key_0, key_1, best, drawn)
    return drawn


@triton.jit  # type: ignore[untyped-decorator]
def _key(shifted: tl.tensor, token: tl.tensor) -> tl.tensor:
    return ((shifted.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.int64) << 32) | token.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def _weight_of_row(
    rows: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    changed: tl.tensor,
    up_to: tl.tensor,
    cut: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """How many tokens, or how much mass, have keys up to both bounds."""
    bound = tl.minimum(up_to, cut)
    weight = bound * 0
    for start in range(0, rows.vocab, BLOCK):
        token = start + tl.arange(0, BLOCK)
        shifted = shift(load_logits(rows, work, row, token, changed), peak, temperature)
        weights = mass_of(shifted) if MASS else (shifted > float("-inf")).to(tl.int64)
        weight += tl.sum(tl.where(_key(shifted, token) <= bound, weights, 0), 0)
    return weight


@triton.jit  # type: ignore[untyped-decorator]
def _cut_of_row(
    rows: tl.tuple,
    work: tl.tuple,
    row: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    changed: tl.tensor,
    target: tl.tensor,
    cut: tl.tensor,
    MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """As `_cut`, of a whole row."""
    low, high = cut * 0, cut
    while low < high:
        middle = low + (high - low) // 2
        if _weight_of_row(rows, work, row, peak, temperature, changed, middle, cut, MASS, BLOCK) >= target:
            high = middle
        else:
            low = middle + 1
    return low
