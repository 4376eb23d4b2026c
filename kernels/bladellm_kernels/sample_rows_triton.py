"""What the kernels of `sample_step` share: their arguments, and a row as they see it."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from bladellm_kernels import slot_parameters as parameters

RANDOM = tl.constexpr(parameters.RANDOM)
TOP_K = tl.constexpr(parameters.TOP_K)
TOP_P = tl.constexpr(parameters.TOP_P)
PENALISED = tl.constexpr(parameters.PENALISED)
BIASED = tl.constexpr(parameters.BIASED)
TEMPERATURE = tl.constexpr(parameters.TEMPERATURE)
TOP_P_COLUMN = tl.constexpr(parameters.TOP_P_COLUMN)
MIN_P_COLUMN = tl.constexpr(parameters.MIN_P_COLUMN)
REPETITION = tl.constexpr(parameters.REPETITION)
PRESENCE = tl.constexpr(parameters.PRESENCE)
FREQUENCY = tl.constexpr(parameters.FREQUENCY)

PARTS = tl.constexpr(128)
"""Programs of a row at most."""

BINS = tl.constexpr(256)
"""Of each of a row's two histograms."""

TOTAL = tl.constexpr(0)
BEFORE = tl.constexpr(1)
INSIDE = tl.constexpr(2)
KEPT = tl.constexpr(3)
KEPT_COUNT = tl.constexpr(4)
CANDIDATES = tl.constexpr(5)
WIDE = tl.constexpr(6)
SUMS = tl.constexpr(8)
"""Columns of `Work.sums`. Masses: TOTAL of the row, BEFORE and INSIDE the bins that are refined, KEPT by every filter
but min-p for certain. Counts: tokens kept so, CANDIDATES written. WIDE: 1 where more are in doubt than fit there."""

_MASS_UNITS = tl.constexpr(2.0**40)


class Rows(NamedTuple):
    """logits [R, V] of a float type and their row stride; slots, positions int64 [R]; mask_rows int32 [R] and masks
    int32 [M, words of 32 tokens], or both None."""

    logits: Any
    stride: Any
    slots: Any
    positions: Any
    mask_rows: Any
    masks: Any
    words: Any
    vocab: Any


class Slots(NamedTuple):
    """The tensors of `SlotParameters`, `seen` as uint8, and the room for bias entries of a slot."""

    flags: Any
    floats: Any
    top_ks: Any
    streams: Any
    seen: Any
    counts: Any
    bias_tokens: Any
    bias_values: Any
    bias_counts: Any
    free_from: Any
    biases: Any


class Work(NamedTuple):
    """The tensors of `SampleWorkspace`, how many programs share a row, and how many tokens each takes."""

    changed: Any
    peaks: Any
    peak_tokens: Any
    histograms: Any
    sums: Any
    candidates: Any
    scores: Any
    score_tokens: Any
    parts: Any
    chunk: Any


@triton.jit  # type: ignore[untyped-decorator]
def mask_row_of(rows: tl.tuple, row: tl.tensor) -> tl.tensor:
    """The row of `rows.masks` that holds for a row, -1 for none."""
    index = row * 0 - 1
    if rows.mask_rows is not None:
        index = tl.load(rows.mask_rows + row)
    return index


@triton.jit  # type: ignore[untyped-decorator]
def has_changes(rows: tl.tuple, row: tl.tensor, flags: tl.tensor) -> tl.tensor:
    """Whether the row's logits are those of `Work.changed`."""
    return ((flags & (PENALISED | BIASED)) != 0) | (mask_row_of(rows, row) >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def load_logits(rows: tl.tuple, work: tl.tuple, row: tl.tensor, token: tl.tensor, changed: tl.tensor) -> tl.tensor:
    """float32 logits of tokens of a row after penalties, bias and mask; -inf outside the vocabulary."""
    inside = token < rows.vocab
    if changed:
        logits = tl.load(work.changed + row.to(tl.int64) * rows.vocab + token, mask=inside, other=float("-inf"))
    else:
        logits = tl.load(rows.logits + row.to(tl.int64) * rows.stride + token, mask=inside, other=float("-inf"))
        logits = logits.to(tl.float32)
    return logits


@triton.jit  # type: ignore[untyped-decorator]
def row_peak(work: tl.tuple, row: tl.tensor) -> tl.tensor:
    """A row's highest logit, +inf where one is NaN; its lowest token; and whether the row is finite."""
    part = tl.arange(0, PARTS)
    peaks = tl.load(work.peaks + row * PARTS + part, mask=part < work.parts, other=float("-inf"))
    tokens = tl.load(work.peak_tokens + row * PARTS + part, mask=part < work.parts, other=0)
    peak = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == peak, tokens, 0x7FFFFFFF), 0)
    return peak, token, (peak > float("-inf")) & (peak < float("inf"))


@triton.jit  # type: ignore[untyped-decorator]
def shift(logits: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Distance to the best token after temperature: 0 or less."""
    shifted = logits - peak
    if temperature != 1.0:
        shifted = tl.math.div_rn(shifted, temperature)
    return shifted


@triton.jit  # type: ignore[untyped-decorator]
def mass_of(shifted: tl.tensor) -> tl.tensor:
    """Weight relative to the best token in units of 2^-40: int64."""
    return (libdevice.exp(shifted) * _MASS_UNITS).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def log_of(number: tl.tensor) -> tl.tensor:
    """The logarithm, as PyTorch rounds it on this device."""
    return libdevice.log(number)


@triton.jit  # type: ignore[untyped-decorator]
def mass_limit(total: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """Top-p keeps a token while the mass before it is below this."""
    return tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def is_ordered(flags: tl.tensor) -> tl.tensor:
    """Whether the row is random and has a filter that needs an order."""
    return ((flags & RANDOM) != 0) & ((flags & (TOP_K | TOP_P)) != 0)
