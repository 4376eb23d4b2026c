"""From a step plan to flat arrays on the CPU, and from these to the tensors of a forward pass: one upload, no
synchronisation."""

from dataclasses import dataclass

import numpy as np
import torch
from bladellm_kernels.lora_tokens import AdapterTiles, TokenAdapters

from bladellm_runtime.engine.step_adapters import Ints, tiles_of
from bladellm_runtime.engine.upload import upload
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.layers.batch import ForwardBatch, PrefillRow, WantedTokens
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan

IntArray = np.ndarray[tuple[int], np.dtype[np.int64]]

WANTED_SHARE = 2
"""Of a step's tokens at most one in so many is wanted where its last layer is computed for those alone: it costs a plan
of decode attention and two gathers, and saves the other tokens' attention, output projection and MLP."""


@dataclass(slots=True)
class SlotTokens:
    """The known tokens of the sequence in a slot: what its prefill chunks read."""

    ids: IntArray
    prompt_len: int
    prompt_logprobs: int | None

    @classmethod
    def of(cls, load: SlotLoad) -> "SlotTokens":
        return cls(load.ids(), load.prompt_len, load.params.prompt_logprobs)


@dataclass(slots=True)
class PromptScore:
    """A prefill chunk whose tokens are to be scored.

    row: its plan row. first: its first token in the flat batch. targets: the ids that follow its first tokens, `wanted`
    the same on the device. top: how many most likely tokens are asked for.
    """

    row: int
    first: int
    targets: IntArray
    top: int
    wanted: torch.Tensor | None = None


@dataclass(slots=True)
class SequenceEnds:
    """Of the sequences in a step's sampling rows, int64 [R] each, as in `WantedTokens`."""

    base_rows: IntArray
    slots: IntArray
    kv_lens: IntArray


@dataclass(slots=True)
class FlatPlan:
    """A plan as int64 arrays: T query tokens, the `num_decode` decode rows first, then the chunks.

    decode_slots, decode_base_rows, decode_kv_lens: [num_decode]. prompt_ids: [T - num_decode]. positions, kv_rows and,
    where layers have a table, granule_rows: [T]. logit_tokens: the last token of each of `sampling_rows`, which are
    plan rows, then the tokens of `scores`; no token twice. sampled: of the sequences of the sampling rows. adapters:
    [T], -1 for none; None where no token has one.
    """

    num_decode: int
    decode_slots: IntArray
    decode_base_rows: IntArray
    decode_kv_lens: IntArray
    prompt_ids: IntArray
    positions: IntArray
    kv_rows: IntArray
    granule_rows: IntArray | None
    logit_tokens: IntArray
    prefills: list[PrefillRow]
    sampling_rows: IntArray
    scores: list[PromptScore]
    sampled: SequenceEnds
    adapters: IntArray | None = None

    @property
    def tokens(self) -> int:
        return len(self.positions)

    @property
    def wants_few(self) -> bool:
        """Whether the last layer is worth computing for `logit_tokens` alone: with chunks, of which none is scored."""
        return bool(self.prefills) and not self.scores and are_few(len(self.sampling_rows), self.tokens)


def are_few(wanted: int, tokens: int) -> bool:
    """Whether so many wanted tokens are worth a last layer of their own."""
    return WANTED_SHARE * wanted <= tokens


@dataclass(slots=True)
class StepInputs:
    """A forward batch; `pinned` is host memory that the upload may still read."""

    batch: ForwardBatch
    pinned: torch.Tensor | None


def flatten(
    plan: StepPlan, tokens: list[SlotTokens | None], arena: KvArena, adapters: IntArray | None = None
) -> FlatPlan:
    """Lay a plan's tokens side by side; the plan's memory operations must have been submitted. `tokens`: by slot;
    `adapters`: by row."""
    slots, starts, query_lens = plan.slots, plan.starts, plan.query_lens
    base_rows = arena.base_rows(slots)
    ends = np.cumsum(query_lens)
    positions = np.arange(int(ends[-1]), dtype=np.int64) + np.repeat(starts - (ends - query_lens), query_lens)
    layer = arena.layer(0)
    granule_rows = None if layer.table is None else arena.granule_rows(np.repeat(slots, query_lens), positions)
    kv_rows = positions + np.repeat(base_rows, query_lens)
    if layer.paged and granule_rows is not None:
        kv_rows = granule_rows
    count = plan.num_decode
    prompt_ids, prefills, scores = _prefill_rows(plan, tokens, ends, base_rows)
    sampling_rows = np.flatnonzero(plan.samples)
    kv_lens = starts + query_lens
    return FlatPlan(
        num_decode=count,
        decode_slots=slots[:count].copy(),  # the plan's must not be written to: torch warns of tensors over them
        decode_base_rows=base_rows[:count],
        decode_kv_lens=starts[:count] + 1,
        prompt_ids=prompt_ids,
        positions=positions,
        kv_rows=kv_rows,
        granule_rows=granule_rows,
        logit_tokens=_logit_tokens(ends, sampling_rows, scores),
        prefills=prefills,
        sampling_rows=sampling_rows,
        scores=scores,
        sampled=SequenceEnds(base_rows[sampling_rows], slots[sampling_rows], kv_lens[sampling_rows]),
        adapters=None if adapters is None else np.repeat(adapters, query_lens),
    )


def build_inputs(flat: FlatPlan, last_token: torch.Tensor, arena: KvArena) -> StepInputs:
    """Upload a flat plan. `last_token` is the device array decode rows read their id from."""
    sections = [
        flat.decode_slots,
        flat.prompt_ids,
        flat.positions,
        flat.kv_rows,
        flat.decode_base_rows,
        flat.decode_kv_lens,
        flat.logit_tokens,
        np.empty(0, dtype=np.int64) if flat.granule_rows is None else flat.granule_rows,
    ]
    sections += [score.targets for score in flat.scores]
    if flat.wants_few:
        sections += [flat.sampled.base_rows, flat.sampled.slots, flat.sampled.kv_lens]
    tiled: list[Ints] = []
    if flat.adapters is not None:
        tiled = [flat.adapters, *(tiles_of(flat.adapters) if flat.prefills else ())]
    sent, pinned = upload([*tiled, *sections], last_token.device)
    adapters, sent = _token_adapters(sent[: len(tiled)]), sent[len(tiled) :]
    decode_slots, prompts, *rest = sent[:7]
    for score, targets in zip(flat.scores, sent[8 : 8 + len(flat.scores)], strict=True):
        score.wanted = targets
    wanted = None
    if flat.wants_few:
        base_rows, slots, kv_lens = sent[-3:]
        wanted = WantedTokens(rest[4], base_rows, slots, kv_lens, int(flat.sampled.kv_lens.max(initial=0)))
    batch = ForwardBatch(
        input_ids=torch.cat([last_token[decode_slots], prompts]) if flat.num_decode else prompts,
        positions=rest[0],
        kv_rows=rest[1],
        granule_rows=None if flat.granule_rows is None else sent[7],
        num_decode=flat.num_decode,
        decode_base_rows=rest[2],
        decode_slots=decode_slots,
        decode_kv_lens=rest[3],
        max_decode_kv_len=int(flat.decode_kv_lens.max()) if flat.num_decode else 0,
        prefills=flat.prefills,
        logit_tokens=rest[4],
        kv=arena,
        wanted=wanted,
        adapters=adapters,
    )
    return StepInputs(batch, pinned)


def _token_adapters(sent: list[torch.Tensor]) -> TokenAdapters | None:
    """From slots, order and tiles, the first of them, or none."""
    if not sent:
        return None
    return TokenAdapters(sent[0], AdapterTiles(sent[1], sent[2]) if len(sent) > 1 else None)


def _prefill_rows(
    plan: StepPlan, tokens: list[SlotTokens | None], ends: IntArray, base_rows: IntArray
) -> tuple[IntArray, list[PrefillRow], list[PromptScore]]:
    chunks: list[IntArray] = []
    prefills: list[PrefillRow] = []
    scores: list[PromptScore] = []
    for row in range(plan.num_decode, len(plan.slots)):
        slot, start, count = int(plan.slots[row]), int(plan.starts[row]), int(plan.query_lens[row])
        known = tokens[slot]
        if known is None:
            raise RuntimeError(f"step {plan.step} prefills slot {slot}, which was never loaded")
        first = int(ends[row]) - count
        chunks.append(known.ids[start : start + count])
        prefills.append(PrefillRow(first, count, start, int(base_rows[row]), slot))
        targets = known.ids[start + 1 : min(start + count + 1, known.prompt_len)]
        if known.prompt_logprobs is not None and len(targets):
            scores.append(PromptScore(row, first, targets, known.prompt_logprobs))
    return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int64), prefills, scores


def _logit_tokens(ends: IntArray, sampling_rows: IntArray, scores: list[PromptScore]) -> IntArray:
    """The last token of each sampling row first, then the tokens of scored prompts."""
    parts = [ends[sampling_rows] - 1]
    parts += [np.arange(score.first, score.first + len(score.targets), dtype=np.int64) for score in scores]
    return np.concatenate(parts)
