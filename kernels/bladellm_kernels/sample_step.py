"""Sample one token a row, with the parameters of the row's slot read on the device.

On CUDA a fixed sequence of kernels that never sorts, waits for nothing on the host and can be captured in a CUDA graph
that then serves any mix of rows. Elsewhere, and as its reference, the operators of PyTorch. The order of the steps and
their meaning: `penalties`, then bias, `min_tokens` and masks, then `sampling` and `gumbel`. Filters cut a row's exact
order and masses are whole numbers, so on one device both ways, all batches and all runs give the same token. Devices
round exponentials and logarithms differently in the last bit: there a token may differ where two scores, or a mass and
its limit, are that close.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bladellm_kernels.gumbel import row_keys
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.penalties import apply_penalties_, count_tokens_
from bladellm_kernels.sampling import Filters, sample_tokens
from bladellm_kernels.slot_parameters import (
    BIASED,
    FREQUENCY,
    MIN_P,
    MIN_P_COLUMN,
    PENALISED,
    PRESENCE,
    RANDOM,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_COLUMN,
    SlotParameters,
)

if TYPE_CHECKING:
    from bladellm_kernels.sample_triton import SampleSchedule

PARTS = 128
BINS = 256
SUMS = 8
CAPACITY = 2048
"""Tokens in doubt of a row, at most, for which the exact cut is found at once; see `sample_threshold_triton`."""

_HALVES = (torch.float32, torch.bfloat16, torch.float16)


class Stage(IntEnum):
    """What a launch sequence can serve: only arg-max; random rows without an order; everything. Each includes the one
    before, and all give a row the same token."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2

    @classmethod
    def of(cls, flags: int) -> "Stage":
        """The least for rows with these flags (all rows' together)."""
        if not flags & RANDOM:
            return cls.GREEDY
        return cls.FILTERED if flags & (TOP_K | TOP_P) else cls.RANDOM


@dataclass(frozen=True, slots=True)
class SampleRows:
    """The rows of a step: slots and positions of the tokens to sample, int64 [R]; a slot below 0 is padding.

    mask_rows: int32 [R], the row of `masks` that says which tokens are allowed, -1 for all. masks: int32 [M, W], W at
    least V / 32; token t is bit t mod 32 of word t // 32.
    """

    slots: Tensor
    positions: Tensor
    mask_rows: Tensor | None = None
    masks: Tensor | None = None


@dataclass(frozen=True, slots=True)
class SampleWorkspace:
    """Memory that the kernels of one step hand one another, for at most R rows of V tokens."""

    changed: Tensor
    peaks: Tensor
    peak_tokens: Tensor
    histograms: Tensor
    sums: Tensor
    candidates: Tensor
    scores: Tensor
    score_tokens: Tensor

    @classmethod
    def empty(cls, rows: int, vocab: int, device: torch.device, capacity: int = CAPACITY) -> "SampleWorkspace":
        """capacity: a power of two."""

        def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            changed=tensor(rows, vocab, dtype=torch.float32),
            peaks=tensor(rows, PARTS, dtype=torch.float32),
            peak_tokens=tensor(rows, PARTS, dtype=torch.int32),
            histograms=tensor(rows, 2, BINS, dtype=torch.int32),
            sums=tensor(rows, SUMS, dtype=torch.int64),
            candidates=tensor(rows, capacity, dtype=torch.int64),
            scores=tensor(rows, PARTS, dtype=torch.float32),
            score_tokens=tensor(rows, PARTS, dtype=torch.int32),
        )

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(getattr(self, name).nbytes for name in self.__slots__)


def sample_step(
    logits: Tensor,
    rows: SampleRows,
    slots: SlotParameters,
    tokens: Tensor,
    feedback: Tensor,
    last_token: Tensor | None = None,
    *,
    workspace: SampleWorkspace | None = None,
    stage: Stage = Stage.FILTERED,
    schedule: "SampleSchedule | None" = None,
) -> None:
    """Write each row's token, and count it in the statistics of penalised slots.

    logits: [R, V] of a float type, left as they are; rows may have a stride. tokens: int64 [R] to write, -1 for
    padding and where the logits are not finite (NaN, +inf, or -inf everywhere). feedback: int64 [R] to write, the
    same with 0 for -1. last_token: int64 [slots], gets the feedback of each slot. workspace: for CUDA. Slots of a step
    are all different. Raises `ValueError` for shapes and types that do not fit.
    """
    _check(logits, rows, slots, tokens, feedback)
    if not logits.is_cuda or not has_triton():
        _by_operators(logits, rows, slots, tokens, feedback, last_token)
        return
    from bladellm_kernels.sample_triton import SampleSchedule, launch

    if workspace is None or workspace.peaks.shape[0] < len(logits) or workspace.changed.shape[1] != logits.shape[1]:
        raise ValueError(f"sampling {tuple(logits.shape)} on CUDA needs a workspace of at least that")
    launch(logits, rows, slots, workspace, (tokens, feedback), last_token, stage, schedule or SampleSchedule())


def change_logits(logits: Tensor, rows: SampleRows, slots: SlotParameters) -> Tensor:
    """float32 logits after penalties, bias, min_tokens and masks, by PyTorch's operators. Rows without padding."""
    changed = logits.float().clone()
    flags = slots.flags[rows.slots]
    penalised = (flags & PENALISED != 0).nonzero().flatten()
    at = rows.slots[penalised]
    repetition, presence, frequency = (slots.floats[at, column] for column in (REPETITION, PRESENCE, FREQUENCY))
    apply_penalties_(changed, penalised, at, slots.seen, slots.counts, repetition, presence, frequency)
    for row in (flags & BIASED != 0).nonzero().flatten().tolist():
        slot = rows.slots[row]
        always, held = slots.bias_counts[slot].tolist()
        free = bool(rows.positions[row] >= slots.free_from[slot])
        for part in (slice(0, always), slice(always, always if free else always + held)):
            changed[row, slots.bias_tokens[slot, part].long()] += slots.bias_values[slot, part]
    if rows.mask_rows is not None and rows.masks is not None:
        token = torch.arange(logits.shape[1], device=logits.device)
        allowed = (rows.masks[rows.mask_rows.long()][:, token // 32] >> (token % 32).int()) & 1
        changed += torch.where((allowed == 1) | (rows.mask_rows < 0)[:, None], 0.0, -torch.inf)
    return changed


def _by_operators(
    logits: Tensor,
    rows: SampleRows,
    slots: SlotParameters,
    tokens: Tensor,
    feedback: Tensor,
    last_token: Tensor | None,
) -> None:
    real = (rows.slots >= 0).nonzero().flatten()
    mask_rows = None if rows.mask_rows is None else rows.mask_rows[real]
    part = SampleRows(rows.slots[real], rows.positions[real], mask_rows, rows.masks)
    changed = change_logits(logits[real], part, slots)
    peaks, drawn = changed.max(dim=-1) if len(real) else (changed.new_empty(0), real)
    flags = slots.flags[part.slots]
    keys = row_keys(slots.streams[part.slots], part.positions)
    for row in (flags & RANDOM != 0).nonzero().flatten().tolist():
        one = slice(row, row + 1)
        drawn[one] = sample_tokens(changed[one], peaks[one], keys[one], _filters(slots, part.slots[one]))
    tokens.fill_(-1)
    tokens[real] = torch.where(peaks.isfinite(), drawn, -1)
    torch.clamp(tokens, min=0, out=feedback)
    if last_token is not None:
        last_token[part.slots] = feedback[real]
    penalised = flags & PENALISED != 0
    count_tokens_(slots.seen, slots.counts, part.slots[penalised], feedback[real][penalised])


def _filters(slots: SlotParameters, slot: Tensor) -> Filters:
    flags, floats, vocab = int(slots.flags[slot]), slots.floats[slot], slots.seen.shape[1]
    return Filters(
        width=vocab if flags & (TOP_K | TOP_P) else 0,
        temperature=floats[:, TEMPERATURE],
        top_k=slots.top_ks[slot] if flags & TOP_K else None,
        top_p=floats[:, TOP_P_COLUMN] if flags & TOP_P else None,
        min_p=floats[:, MIN_P_COLUMN] if flags & MIN_P else None,
    )


def _check(logits: Tensor, rows: SampleRows, slots: SlotParameters, tokens: Tensor, feedback: Tensor) -> None:
    count, vocab = logits.shape
    if logits.dtype not in _HALVES or (count and logits.stride(1) != 1) or vocab != slots.seen.shape[1]:
        raise ValueError(f"logits must be dense rows of {slots.seen.shape[1]} floats, got {logits.dtype} [R, {vocab}]")
    for name, tensor in (
        ("slots", rows.slots), ("positions", rows.positions), ("tokens", tokens), ("feedback", feedback)
    ):  # fmt: skip
        if tensor.shape != (count,) or tensor.dtype != torch.int64:
            raise ValueError(f"{name} must be int64 [{count}], got {tensor.dtype} {tuple(tensor.shape)}")
    if (rows.mask_rows is None) != (rows.masks is None):
        raise ValueError("mask_rows and masks must be given together")
    if rows.masks is not None and rows.masks.shape[1] * 32 < vocab:
        raise ValueError(f"masks must be bits for {vocab} tokens, got {rows.masks.shape[1]} words")
