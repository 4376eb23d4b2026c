"""The sampler: from a step's logits to its tokens, without ever waiting for the device.

The order, for each row: raw log-probabilities (if asked) → the mask of its constraint (other tokens get -inf) →
repetition, then frequency and presence penalties → logit bias → min_tokens (the tokens that could end the request get
-inf) → temperature → top-k → top-p → min-p → Gumbel-max draw, or the arg-max when greedy. Log-probabilities are of the
model's own distribution, whatever the mask allows. Definitions: `bladellm_kernels.token_mask`, `.penalties`,
`.sampling`, `.gumbel`. transformers has the same order but biases before it penalises; vLLM biases and masks first, and
applies min-p before top-k. As in vLLM, min_tokens holds the eos tokens back even with ignore_eos.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from bladellm_kernels.gumbel import row_keys
from bladellm_kernels.logprobs import token_logprobs
from bladellm_kernels.penalties import apply_penalties_, count_tokens_
from bladellm_kernels.sample_step import SampleRows, Stage, sample_step
from bladellm_kernels.sampling import Filters, sample_tokens
from bladellm_kernels.slot_parameters import (
    BIASED,
    MIN_P,
    MIN_P_COLUMN,
    PENALISED,
    RANDOM,
    REPETITION,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    TOP_P_COLUMN,
)
from torch import Tensor

from bladellm_runtime.engine.sampling_state import LOGPROBS, SORTED, Ints, SamplingState
from bladellm_runtime.engine.upload import Array, upload
from bladellm_runtime.engine.uploaded_masks import UploadedMasks
from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.wire.messages import TokenLogprobs


@dataclass(frozen=True, slots=True)
class DrawGroup:
    """Random rows drawn together. `rows` int64 on the device, None for all rows; `flags` the union of what they need;
    `width` as in `Filters`."""

    rows: Tensor | None
    flags: int
    width: int


@dataclass(slots=True)
class SampleInputs:
    """What one step's sampling needs, R being its sampling rows in plan order.

    slots, positions: int64 [R] on the device, the slot and the position of the token to sample. penalised: int64 [P]
    row numbers. bias: row int64, token int64 and value float32 of each logit to change. logprob_rows: int64 [L] row
    numbers, also on the CPU in `logprob_indices` with how many most likely tokens each asked for. `keep` holds host
    memory that an upload may still read. stage: which kernels the rows need; where kernels sample, they find the rest
    (`draws`, `penalised` and `bias` are empty).
    """

    slots: Tensor
    positions: Tensor
    draws: list[DrawGroup] = field(default_factory=list)
    penalised: Tensor | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    logprob_rows: Tensor | None = None
    logprob_indices: list[tuple[int, int]] = field(default_factory=list)
    keep: list[Tensor] = field(default_factory=list)
    stage: Stage = Stage.FILTERED

    @property
    def plain(self) -> bool:
        """No row's logits are changed before they are filtered."""
        return self.penalised is None and self.bias is None


@dataclass(slots=True)
class SampleOutputs:
    """What one step sampled.

    tokens: int64 [R], -1 where the row's logits are not finite (NaN, +inf, or -inf everywhere, be it only after bias
    and min_tokens). feedback: int64 [R], the tokens with 0 for -1, what the next step reads. logprob_ids int64 and
    logprobs float32 [L, 1 + most asked for]: one line an entry of `logprob_indices`, the sampled token first; they may
    be replaced by host copies before `read_logprobs`.
    """

    tokens: Tensor
    feedback: Tensor
    logprob_ids: Tensor | None = None
    logprobs: Tensor | None = None
    logprob_indices: list[tuple[int, int]] = field(default_factory=list)

    def read_logprobs(self) -> Iterator[tuple[int, TokenLogprobs]]:
        """Sampling row and log-probabilities of each row that asked. Waits for tensors still on the device."""
        if self.logprob_ids is None or self.logprobs is None:
            return
        lines = zip(self.logprob_indices, self.logprob_ids.tolist(), self.logprobs.tolist(), strict=True)
        for (row, asked), ids, values in lines:
            yield row, TokenLogprobs(ids[: 1 + asked], values[: 1 + asked])


class Sampler:
    """Samples the rows of step plans from logits, with the parameters of a `SamplingState`."""

    def __init__(self, state: SamplingState) -> None:
        self._state = state

    def prepare(self, plan: StepPlan) -> SampleInputs:
        """Plan a step's sampling on the CPU and queue its uploads on the current stream, that of `sample`.

        The loads of the plan must have been given to the state. Steps are prepared and sampled in order.
        """
        keep = self._state.flush()
        slots = plan.slots[plan.samples]
        positions = (plan.starts + plan.query_lens)[plan.samples]
        plan_rows = self._plan_rows if self._state.parameters is None else self._plan_kernel_rows
        return plan_rows(slots, positions, keep)

    def _plan_kernel_rows(self, slots: Ints, positions: Ints, keep: list[Tensor]) -> SampleInputs:
        flags = self._state.flags[slots]
        scored = np.flatnonzero(flags & LOGPROBS)
        sent, pinned = upload([slots, positions, scored], self._state.device)
        return SampleInputs(
            slots=sent[0],
            positions=sent[1],
            logprob_rows=sent[2] if len(scored) else None,
            logprob_indices=self._logprob_indices(slots, scored),
            keep=keep if pinned is None else [*keep, pinned],
            stage=Stage.of(int(np.bitwise_or.reduce(flags))),
        )

    def _logprob_indices(self, slots: Ints, scored: Array) -> list[tuple[int, int]]:
        return list(zip(scored.tolist(), self._state.top_logprobs[slots[scored]].tolist(), strict=True))

    def _plan_rows(self, slots: Ints, positions: Ints, keep: list[Tensor]) -> SampleInputs:
        flags = self._state.flags[slots]
        groups = self._draw_groups(slots, flags)
        penalised = np.flatnonzero(flags & PENALISED)
        bias = self._bias(slots, positions, flags)
        scored = np.flatnonzero(flags & LOGPROBS)
        arrays: list[Array] = [slots, positions, penalised, scored, *bias, *(rows for rows, _, _ in groups)]
        sent, pinned = upload(arrays, self._state.device)
        draws = [
            DrawGroup(rows if len(rows) < len(slots) else None, union, width)
            for rows, (_, union, width) in zip(sent[7:], groups, strict=True)
        ]
        return SampleInputs(
            slots=sent[0],
            positions=sent[1],
            draws=draws,
            penalised=sent[2] if len(penalised) else None,
            bias=(sent[4], sent[5], sent[6]) if len(bias[0]) else None,
            logprob_rows=sent[3] if len(scored) else None,
            logprob_indices=self._logprob_indices(slots, scored),
            keep=keep if pinned is None else [*keep, pinned],
        )

    def _draw_groups(self, slots: Ints, flags: Array) -> list[tuple[Ints, int, int]]:
        """Random rows by the work they need: (row numbers, union of their flags, width of `Filters`)."""
        groups = []
        # Top-p with and without a wide top-k stay apart: without, the whole row rarely needs sorting.
        for kind in (RANDOM, RANDOM | TOP_K, RANDOM | SORTED, RANDOM | SORTED | TOP_K):
            rows = np.flatnonzero(flags & (RANDOM | TOP_K | SORTED) == kind)
            if len(rows):
                width = self._state.vocab_size if kind & SORTED else int(self._state.widths[slots[rows]].max())
                groups.append((rows, int(np.bitwise_or.reduce(flags[rows])), width))
        return groups

    def _bias(self, slots: Ints, positions: Ints, flags: Array) -> tuple[Array, Array, Array]:
        """(row, token, value) of every logit to change, each pair of row and token once."""
        rows, tokens, values = [], [], []
        for row in np.flatnonzero(flags & BIASED).tolist():
            slot = int(slots[row])
            bias = self._state.biases[slot]
            generated = positions[row] - self._state.prompt_lens[slot]
            ids, added = bias.before_min_tokens if generated < self._state.min_tokens[slot] else bias.always
            rows.append(np.full(len(ids), row, dtype=np.int64))
            tokens.append(ids)
            values.append(added)
        if not rows:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float32)
        return np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)

    def sample(
        self,
        logits: Tensor,
        inputs: SampleInputs,
        last_token: Tensor | None = None,
        masks: UploadedMasks | None = None,
    ) -> SampleOutputs:
        """Sample one token a row. logits: float32 [R, vocabulary], may be overwritten; also bfloat16 and float16 where
        kernels sample. last_token: int64 [slots], gets the feedback of each slot. masks: which tokens rows may get."""
        raw: Tensor | None = None
        if masks is not None:
            if inputs.logprob_rows is not None:
                raw = logits.index_select(0, inputs.logprob_rows)
            masks.apply(logits)
        if self._state.parameters is not None:
            return self._sample_by_kernels(logits, inputs, last_token, raw)
        outputs = self._sample_by_operators(logits, inputs, raw)
        if last_token is not None:
            last_token.index_copy_(0, inputs.slots, outputs.feedback)
        return outputs

    def sample_rows(
        self,
        logits: Tensor,
        rows: SampleRows,
        tokens: Tensor,
        feedback: Tensor,
        last_token: Tensor | None,
        stage: Stage = Stage.FILTERED,
    ) -> None:
        """`sample_step` with the state of this sampler: launches only, may be captured in a graph for any requests that
        `stage` covers. Raises `ValueError` where no kernels sample."""
        if self._state.parameters is None:
            raise ValueError("this sampler's state is not kept for kernels")
        sample_step(
            logits, rows, self._state.parameters, tokens, feedback, last_token,
            workspace=self._state.workspace, stage=stage,
        )  # fmt: skip

    def _sample_by_kernels(
        self, logits: Tensor, inputs: SampleInputs, last_token: Tensor | None, raw: Tensor | None
    ) -> SampleOutputs:
        tokens, feedback = torch.empty_like(inputs.slots), torch.empty_like(inputs.slots)
        rows = SampleRows(inputs.slots, inputs.positions)
        self.sample_rows(logits, rows, tokens, feedback, last_token, inputs.stage)
        outputs = SampleOutputs(tokens, feedback)
        if inputs.logprob_rows is not None:
            _score(logits if raw is None else raw, inputs.logprob_rows, inputs.logprob_indices, outputs)
        return outputs

    def _sample_by_operators(self, logits: Tensor, inputs: SampleInputs, raw: Tensor | None) -> SampleOutputs:
        """raw: as in `_score`, where the logits have been changed already."""
        expected = (inputs.slots.shape[0], self._state.vocab_size)
        if logits.shape != expected or logits.dtype != torch.float32:
            raise ValueError(f"logits must be float32 {expected}, got {logits.dtype} {tuple(logits.shape)}")
        floats = self._state.floats[inputs.slots] if inputs.draws or inputs.penalised is not None else None
        changed = self._change_logits(logits, inputs, floats)
        peaks, tokens = changed.max(dim=-1)
        # NaN and +inf in the raw logits pass through every change, that to -inf too: it is an addition.
        valid = peaks.isfinite()
        if floats is not None and inputs.draws:
            self._draw(changed, peaks, tokens, floats, inputs)
        outputs = SampleOutputs(torch.where(valid, tokens, -1), torch.where(valid, tokens, 0))
        if inputs.penalised is not None:
            rows = inputs.penalised
            count_tokens_(*self._state.statistics, inputs.slots[rows], outputs.feedback[rows])
        if inputs.logprob_rows is not None:
            _score(logits if raw is None else raw, inputs.logprob_rows, inputs.logprob_indices, outputs)
        return outputs

    def _change_logits(self, logits: Tensor, inputs: SampleInputs, floats: Tensor | None) -> Tensor:
        """Penalties, bias and min_tokens; in place unless the raw logits are still to be scored."""
        changed = logits if inputs.plain or inputs.logprob_rows is None else logits.clone()
        if inputs.penalised is not None and floats is not None:
            rows = inputs.penalised
            repetition, presence, frequency = floats[rows, REPETITION:].unbind(dim=1)
            statistics = self._state.statistics
            apply_penalties_(changed, rows, inputs.slots[rows], *statistics, repetition, presence, frequency)
        if inputs.bias is not None:
            at_rows, at_tokens, values = inputs.bias
            changed.index_put_((at_rows, at_tokens), changed[at_rows, at_tokens] + values)
        return changed

    def _draw(self, logits: Tensor, peaks: Tensor, tokens: Tensor, floats: Tensor, inputs: SampleInputs) -> None:
        """Replace the arg-max by a draw in the rows that are random."""
        keys = row_keys(self._state.streams[inputs.slots], inputs.positions)
        for group in inputs.draws:
            rows = group.rows
            if rows is None:
                tokens.copy_(sample_tokens(logits, peaks, keys, self._filters(group, floats, inputs.slots)))
                continue
            filters = self._filters(group, floats[rows], inputs.slots[rows])
            tokens.index_copy_(0, rows, sample_tokens(logits[rows], peaks[rows], keys[rows], filters))

    def _filters(self, group: DrawGroup, floats: Tensor, slots: Tensor) -> Filters:
        return Filters(
            width=group.width,
            temperature=floats[:, TEMPERATURE],
            top_k=self._state.top_ks[slots] if group.flags & TOP_K else None,
            top_p=floats[:, TOP_P_COLUMN] if group.flags & TOP_P else None,
            min_p=floats[:, MIN_P_COLUMN] if group.flags & MIN_P else None,
        )


def _score(logits: Tensor, rows: Tensor, indices: list[tuple[int, int]], outputs: SampleOutputs) -> None:
    """logits: of all rows, or of `rows` alone."""
    wanted = logits if rows.shape[0] == logits.shape[0] else logits[rows]
    most = max(asked for _, asked in indices)
    outputs.logprob_ids, outputs.logprobs = token_logprobs(wanted.float(), outputs.feedback[rows], most)
    outputs.logprob_indices = indices
