"""`Planner`: fills a step with decode rows, prefill chunks and new requests."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

import numpy as np

from bladellm_runtime.kv.shared_reads import SharedReads
from bladellm_runtime.scheduler import policy
from bladellm_runtime.scheduler.cost_drift import CostDrift
from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget, LatePrompts, StepRoom
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.micro_batches import has_room
from bladellm_runtime.scheduler.plan import Chunk, SlotLoad, StepPlan
from bladellm_runtime.scheduler.prefill_budget import (
    BUSY_BOUNDS,
    PrefillDemand,
    StepBound,
    prefill_budget,
    queue_limit,
)
from bladellm_runtime.scheduler.prompt_load import PromptLoad
from bladellm_runtime.scheduler.roster import Roster
from bladellm_runtime.scheduler.sequence import Sequence, State
from bladellm_runtime.scheduler.step_cost import StepCost

AHEAD_STEPS = 2
"""Full steps of prompts that are let in ahead. With one, what is not mapped in time makes the next step a short one,
which leaves the prompts behind it as little time, so that every other step is short from then on."""
COUNTED_PROMPTS = 256
"""Queued prompts, the first ones, whose tokens are counted for a step: the others are taken to be as long."""


@dataclass(slots=True)
class Ahead:
    """Who was let in for steps to come. limit: prompt tokens of a step, of `AHEAD_STEPS` of which all that are let in
    ahead have no more, but for the last. closed: whether nobody else begins in this step."""

    limit: int = 0
    tokens: int = 0
    closed: bool = False

    @property
    def is_full(self) -> bool:
        return self.tokens >= AHEAD_STEPS * max(self.limit, 1)

    def add(self, tokens: int) -> None:
        """One with so many prompt tokens; nobody overtakes it."""
        self.tokens += tokens
        self.closed = True


class Planner:
    """Decode rows come first, oldest first, then prefill chunks, then new requests, all in arrival order, but for short
    prompts behind a long one, which get up to half of the tokens that it would have alone, and for those who are late
    (`LatePrompts`).

    Every decoding sequence keeps one token of the step's budget, planned or not. Since each prefill that ends took at
    least one token from the rest, there are never more decoding sequences than fit into one step: none has to take
    turns, and prefills wait while they fill the step. With several micro-batches all this holds of the one that the
    step is for; new requests come to the smaller ones.
    """

    def __init__(
        self, limits: SchedulerLimits, roster: Roster, shared_reads: SharedReads | None = None, groups: int = 1
    ) -> None:
        """groups: micro-batches that take turns."""
        self.limits = limits
        self._roster = roster
        self._groups = groups
        self._group = 0
        self.shared_reads = shared_reads
        """Says which decode rows read what they share once; None: each reads for itself."""
        self._short_rows = 0
        self._chunks: list[Chunk] = []
        """Of the step that is being planned."""
        self._ahead = Ahead()
        self._load = PromptLoad()
        self.bound: StepBound | None = None
        """How long steps may take; None leaves their length to the limits."""
        self.target: FirstTokenTarget | None = None
        """When prompts are late, and others go first; None: none is."""
        self._late = LatePrompts(roster)
        self._measured: StepCost | None = None
        """What steps cost where those two were given; their own costs follow what steps take."""
        self._drift = CostDrift()

    def bound_steps(self, bound: StepBound | None, target: FirstTokenTarget | None) -> None:
        """Keep to these from now on; where both are given they have one cost."""
        given = bound or target
        self.bound, self.target = bound, target
        self._measured, self._drift = None if given is None else given.cost, CostDrift()

    def took(self, plan: StepPlan, milliseconds: float) -> None:
        """A step did, from the end of the one in front of it on."""
        if self._measured is None or not plan.has_prompts or plan.constrained:
            return
        if self._drift.note(self._measured, plan.load, milliseconds):
            cost = self._drift.applied(self._measured)
            self.bound = self.bound and replace(self.bound, cost=cost)
            self.target = self.target and replace(self.target, cost=cost)

    def fill(self, step: int, now: float, group: int = 0) -> StepPlan | None:
        """Plan a step of a micro-batch; None when nothing of it can run now."""
        self._group = group
        budget = self.limits.max_batch_tokens - len(self._roster.batches[group])
        plan = self._begin(step)
        if budget <= 0 and not plan.num_decode:
            budget += self._make_way()
        if self.target is not None and self._roster.has_prompts:
            self._late.sort(self.target, self._own(self._roster.prefilling), self._room(self.target.cost, plan), now)
        if self.bound is not None and budget > 0:
            budget = self._bounded(self.bound, plan, budget, now)
        self._chunks = []
        self._ahead = Ahead(budget)
        if self._roster.prefilling:
            self._put_back_unsound()
            budget = self._overtake(plan, budget, now)
            budget = self._continue_prefills(plan, budget)
        if self._roster.waiting:
            budget = self._admit(plan, budget, now)
        if not plan.num_decode and not self._chunks:
            return None
        if budget <= 0:
            self._admit_ahead(plan, now)
        if self._chunks:
            plan.append(self._chunks)
            if self.bound is not None:
                tokens = sum(chunk.query_len for chunk in self._chunks)
                self._load.add(self.bound.cost.prefill_milliseconds(tokens), now)
        elif self.shared_reads is not None:
            plan.prefixes = self.shared_reads.groups(plan.slots, group)
        if self._roster.constrained:
            sampling = np.flatnonzero(plan.samples).tolist()
            plan.constrained = [row for row in sampling if self._restricts(plan, row)]
        return plan

    def _restricts(self, plan: StepPlan, row: int) -> bool:
        """Whether a constraint restricts the tokens of a row."""
        seq = self._roster.slots.owner_of(plan, row)
        return seq is not None and seq.prepared.matcher is not None

    def _own(self, sequences: list[Sequence]) -> Iterable[Sequence]:
        """Those of the micro-batch that the step is for; shows what becomes of the list meanwhile."""
        if self._groups == 1:
            return sequences
        group = self._group
        return (seq for seq in sequences if seq.group == group)

    def _has_room(self) -> bool:
        """Whether the micro-batch that the step is for may get another sequence."""
        if self._groups == 1:
            return True
        sizes = [0] * self._groups
        for seq in self._roster.running():
            sizes[seq.group] += 1
        return has_room(self._group, sizes, len(self._roster.waiting), len(self._roster.slots.owner))

    def _let_in(self, plan: StepPlan, now: float) -> Sequence | None:
        """Let the head of the queue into the micro-batch that the step is for, if there is room for it. It may have no
        part in the plan then, where decode rows would have to wait for its memory, nor have those behind it."""
        if self._ahead.is_full or not self._has_room():
            return None
        seq = self._roster.admit(now)
        if seq is None:
            return None
        seq.group = self._group
        if self._ahead.closed or not self._is_ready(plan, seq, self._chunk_tokens(seq, self._ahead.limit)):
            self._ahead.add(policy.tokens_left(seq))
            # Moves of this plan may write to its memory, which must not go to others before they are done.
            seq.last_step = plan.step
        return seq

    def _is_ready(self, plan: StepPlan, seq: Sequence, tokens: int) -> bool:
        """Whether no decode row has to wait for the memory of a sequence's next tokens. Not asked with several
        micro-batches, where others would begin before its turn comes again."""
        return self._groups > 1 or not plan.num_decode or self._roster.slots.is_shown(seq, seq.planned + tokens)

    def _chunk_tokens(self, seq: Sequence, budget: int) -> int:
        return policy.chunk_tokens(seq, budget, self.limits.prefill_chunk_tokens)

    def _bounded(self, bound: StepBound, plan: StepPlan, limit: int, now: float) -> int:
        """The budget for prompt tokens beside the plan's decode rows."""
        line = chain(self._own(self._roster.prefilling), self._roster.waiting)
        first = next(line, None)
        if first is None:
            return limit
        start, end = first.prefill_range
        queued, enough, behind = 0, queue_limit(bound), list[int]()
        for counted, seq in enumerate(line, 1):
            tokens = policy.tokens_left(seq)
            if queued < limit:
                behind.append(tokens)
            queued += tokens
            if queued > enough:
                break
            if counted == COUNTED_PROMPTS:
                queued = queued * max(len(self._roster.waiting), COUNTED_PROMPTS) // COUNTED_PROMPTS
                break
        load = self._load.share(now)
        demand = PrefillDemand(plan.num_decode, int(plan.starts.sum()), start, end - start, queued, load, tuple(behind))
        return prefill_budget(bound, demand, limit)

    def _room(self, cost: StepCost, plan: StepPlan) -> StepRoom:
        """What steps with the decode rows of this one have for prompts."""
        base = cost.decode_milliseconds(plan.num_decode, int(plan.starts.sum()))
        if self.bound is None:
            return StepRoom(base, inf, self.limits.max_batch_tokens)
        within = self.bound.milliseconds
        return StepRoom(base, BUSY_BOUNDS * within, cost.prefill_tokens(within - base, 0))

    def _begin(self, step: int) -> StepPlan:
        """A plan with a decode row of each sequence that has room for one, and whose room is mapped: the others need
        not wait for that."""
        batch, slots = self._roster.batches[self._group], self._roster.slots
        found: list[Sequence] = []
        late: list[Sequence] = []
        self._short_rows = 0
        due = batch.due()
        # Growing may preempt sequences behind the current one, never before it.
        for seq in due:
            if seq.state is not State.DECODE:
                continue
            planned = seq.planned + 1
            if planned > seq.reserved and not self._grow(seq):
                batch.leave_out(seq)
            elif slots.opens_granule(seq.planned) and not slots.is_shown(seq, planned):
                late.append(seq)
            else:
                found.append(seq)
        if not found and len(batch) == sum(seq.state is State.DECODE for seq in due):
            found, late = late, []
        for seq in late:
            batch.leave_out(seq)
        for seq in found:
            if batch.needs_soon(seq):
                slots.take_ahead(seq)
            if batch.thinks_ahead(seq):
                slots.map_ahead(seq, seq.planned + 1)
        plan = batch.advance(step, found)
        for seq in found:
            if seq.planned == seq.kv_end:
                self._roster.drain(seq)
        return plan

    def _grow(self, seq: Sequence) -> bool:
        """Make room for a decode row's token, preempting newer sequences if need be.

        False leaves the row out of this step: memory for it is on its way, or nothing newer is left to give way.
        """
        roster = self._roster
        while not roster.slots.grow(seq, seq.planned + 1):
            victim = roster.newest_running()
            if victim is seq or roster.slots.retired_granules() > self._short_rows:
                self._short_rows += 1
                return False
            roster.preempt(victim)
        return True

    def _make_way(self) -> int:
        """Preempt the newest decode row of a full batch that has memory for none of its tokens, where prompts that came
        before it have theirs, as late ones do: they would wait for each other. Returns the rows that are free then."""
        decoding = list(self._own(self._roster.decoding))
        older = (seq for seq in self._own(self._roster.prefilling) if decoding and seq.order < decoding[-1].order)
        if self._roster.slots.retired_granules() or next(older, None) is None:
            return 0
        self._roster.preempt(decoding[-1])
        return 1

    def _put_back_unsound(self) -> None:
        """Let those in again that have not begun and share what has been forgotten since, and who came behind them."""
        line, slots = list(self._roster.prefilling), self._roster.slots
        unsound = (place for place, seq in enumerate(line) if not seq.loaded and not slots.is_sound(seq))
        for seq in reversed(line[next(unsound, len(line)) :]):
            self._roster.put_back(seq)

    def _overtake(self, plan: StepPlan, budget: int, now: float) -> int:
        """Where the prompt in front fills the step and more, add chunks of those behind it that are much shorter;
        returns what the others may have."""
        line = list(self._own(self._roster.prefilling))
        spare = budget // policy.OVERTAKING_SHARE
        if not line or spare <= 0 or policy.tokens_left(line[0]) <= budget:
            return budget
        if not self._is_ready(plan, line[0], self._chunk_tokens(line[0], budget)):
            return budget
        kept = budget - spare
        for seq in self._overtaking(plan, line, now):
            tokens = self._add_chunk(plan, seq, spare)
            spare -= tokens
            if not tokens or not spare:
                break
        return kept + spare

    def _overtaking(self, plan: StepPlan, line: list[Sequence], now: float) -> Iterator[Sequence]:
        """Those behind the first of a line that may overtake it; from the queue as far as its head may, let in as they
        are asked for."""
        front, *behind = line
        yield from (seq for seq in behind if policy.overtakes(seq, front))
        while self._roster.waiting and policy.overtakes(self._roster.waiting[0], front):
            seq = self._let_in(plan, now)
            if seq is None:
                return
            if seq.last_step < plan.step:
                yield seq

    def _continue_prefills(self, plan: StepPlan, budget: int) -> int:
        for seq in list(self._own(self._roster.prefilling)):
            if budget == 0:
                break
            if seq.last_step < plan.step:
                tokens = self._add_chunk(plan, seq, budget)
                # Where decode rows would wait for the memory of one, those behind it do not overtake it.
                budget = budget - tokens if tokens else 0
        return budget

    def _admit(self, plan: StepPlan, budget: int, now: float) -> int:
        while budget > 0 and self._roster.waiting:
            seq = self._let_in(plan, now)
            if seq is None:
                break
            if seq.last_step < plan.step:
                budget -= self._add_chunk(plan, seq, budget)
        return budget

    def _admit_ahead(self, plan: StepPlan, now: float) -> None:
        """Let the head of the queue in although this step is full, and those behind it as far as the next steps go:
        their memory is mapped while this one runs."""
        if self._groups > 1:
            return
        self._ahead.closed = True
        left = (policy.tokens_left(seq) for seq in self._roster.prefilling if seq.last_step < plan.step)
        self._ahead.tokens += sum(left)
        while self._roster.waiting and self._let_in(plan, now) is not None:
            pass

    def _add_chunk(self, plan: StepPlan, seq: Sequence, budget: int) -> int:
        """Add the next prefill chunk of a sequence, if its memory is there; returns its tokens."""
        tokens = self._chunk_tokens(seq, budget)
        if not self._is_ready(plan, seq, tokens):
            return 0
        if not seq.loaded:
            # A copy: the sequence appends to its own tokens while this plan is in flight.
            known, adapter = seq.tokens.tobytes(), seq.prepared.adapter
            load = SlotLoad(seq.slot, seq.generation, known, seq.prompt_len, seq.params, seq.choice, adapter)
            plan.loads.append(load)
            seq.loaded = True
            self._late.began(seq)
            if seq.cached < 0:
                seq.cached = seq.planned
        done = seq.planned + tokens == seq.prefill_end
        samples = done and seq.max_len > seq.prompt_len
        self._chunks.append(Chunk(seq.slot, seq.generation, seq.planned, tokens, samples))
        seq.planned += tokens
        seq.last_step = plan.step
        self._roster.slots.remember(seq)
        if done:
            self._roster.prefilled(seq)
            # Where the prompt ends in the second half of a granule, decode rows come too late to think ahead.
            self._roster.slots.map_ahead(seq, seq.planned)
        return tokens
