"""The scheduler: requests and step results in, step plans and deltas out."""

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.shared_reads import SharedReads, SharingRule
from bladellm_runtime.request import FinishReason
from bladellm_runtime.scheduler import invariants
from bladellm_runtime.scheduler.admission import INVALID_REQUEST, kv_capacity, make_sequence, refusal, tokens_of
from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.micro_batches import MicroBatches
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.planner import Planner
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.prepared import ConstrainedRow, Prepared
from bladellm_runtime.scheduler.results import ResultReader
from bladellm_runtime.scheduler.roster import Roster
from bladellm_runtime.scheduler.sequence import by_arrival
from bladellm_runtime.wire.messages import AddRequest, Delta, EngineStats, RequestDelta

OUT_OF_MEMORY = "out_of_memory"
"""The error of a request for which the device has no memory left beside the KV cache."""


class Scheduler:
    """Continuous batching with chunked prefill over a KV arena of fixed size.

    `plan` makes the next step from lengths alone, while earlier steps may still run; `complete` takes their tokens in
    the order planned. The tokens a request gets do not depend on how many steps are in flight.

    Admission is first come, first served, but for prompts that are late (`LatePrompts`): the head of the queue enters
    once a slot and the granules for all its known tokens are there, with headroom for those that run. When a decode row
    finds the pool empty, the newest running sequence gives way: it goes back to the head of the queue and is
    recomputed. The oldest never gives way, so it always finishes, and then the next one is the oldest. A slot whose
    sequence ended or gave way is given back after the last step that contains it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: KvAccounting,
        clock: Callable[[], float] = time.monotonic,
        sharing: SharingRule | None = None,
        micro_batches: MicroBatches | None = None,
    ) -> None:
        """sharing: when decode rows read what they share once; never when None. micro_batches: which running sequences
        a step is for; all of them when None."""
        self._limits = limits
        self._memory = memory
        self._clock = clock
        self._capacity = kv_capacity(memory.spec)
        shared_reads = None if sharing is None else SharedReads(memory, sharing)
        self._micro_batches = micro_batches or MicroBatches()
        self._roster = Roster(memory, limits.vocab_size, shared_reads, self._micro_batches.count)
        self._planner = Planner(limits, self._roster, shared_reads, self._micro_batches.count)
        self._reader = ResultReader(self._roster)
        self._in_flight: deque[tuple[StepPlan, float]] = deque()
        self._tokens: array[int] | None = None
        """Of the request looked at last."""
        self._added = 0
        self._planned = 0
        self._given_up = 0
        self._steps_before = 0
        self._step_seconds = 0.0
        self._last_completion = 0.0
        self.last_step_seconds = 0.0
        """What the step that was completed last took: since the one before it, or since it was planned."""

    @property
    def has_work(self) -> bool:
        """True while a request has not got its terminal delta."""
        return bool(self._roster.live)

    @property
    def has_prompts(self) -> bool:
        """True while a request waits or is being prefilled: the next step probably has prompt tokens."""
        return self._roster.has_prompts

    @property
    def idle(self) -> bool:
        """True when no request is live and no step is in flight; then no KV memory is used."""
        return not self._roster.live and not self._in_flight

    @property
    def live_ids(self) -> list[int]:
        """The ids of the requests that are queued or running."""
        return list(self._roster.live)

    def watch_ends(self, ended: Callable[[int], None]) -> None:
        """Have `ended` called with the id of every request that ends."""
        self._roster.ended = ended

    def refusal(self, request: AddRequest) -> RequestDelta | None:
        """The terminal delta of a request that can never run, or whose id is live; None for others."""
        self._tokens = tokens_of(request.prompt, self._limits.vocab_size)
        error = refusal(self._tokens, self._limits, self._capacity)
        if request.request_id in self._roster.live:
            error = INVALID_REQUEST
        return None if error is None else RequestDelta(request.request_id, [], FinishReason.ERROR, error)

    def add(self, request: AddRequest, prepared: Prepared | None = None) -> RequestDelta | None:
        """Queue a request, with what it was given beforehand. One that can never run, or whose
        id is live, gets its terminal delta at once."""
        refused = self.refusal(request)
        if refused is None:
            self.accept(request, prepared)
        return refused

    def accept(self, request: AddRequest, prepared: Prepared | None = None) -> None:
        """Queue a request that `refusal` has just let pass."""
        tokens, self._tokens = self._tokens, None
        assert tokens is not None
        self._added += 1
        limits, capacity = self._limits, self._capacity
        self._roster.add(make_sequence(request, tokens, self._added, limits, capacity, prepared or Prepared()))

    def abort(self, request_ids: Iterable[int]) -> list[RequestDelta]:
        """End requests now: one terminal delta for each live one. What steps in flight still produce is dropped."""
        deltas: list[RequestDelta] = []
        for request_id in request_ids:
            seq = self._roster.live.get(request_id)
            if seq is not None:
                self._roster.end(seq)
                deltas.append(RequestDelta(request_id, [], FinishReason.ABORT))
        return deltas

    def plan(self) -> StepPlan | None:
        """The next step, given everything planned so far; None when nothing can run now.

        A returned plan must be run, and passed to `complete` in its turn.
        """
        now = self._clock()
        for group in self._micro_batches.turns():
            plan = self._planner.fill(self._planned + 1, now, group)
            if plan is not None:
                break
        else:
            return None
        plan.memory = self._memory.drain_ops()
        self._planned = plan.step
        self._in_flight.append((plan, now))
        self._micro_batches.planned(group)
        return plan

    def complete(self, plan: StepPlan, result: StepResult, now: float) -> list[Delta]:
        """Take the results of the oldest step in flight; `now` is when they were in.

        Returns what each request got, with `finish` set for those that ended. Raises `ValueError` for any other step.
        """
        if not self._in_flight or self._in_flight[0][0] is not plan:
            raise ValueError(f"step {plan.step} is not the oldest step in flight")
        _, planned_at = self._in_flight.popleft()
        self._micro_batches.completed()
        slots = self._roster.slots
        slots.completed = plan.step
        slots.doubt_retired(plan, result)
        deltas = self._reader.read(plan, result)
        self._memory.complete(plan.step)
        slots.release_retired()
        self.last_step_seconds = max(0.0, now - max(planned_at, self._last_completion))
        if planned_at < self._last_completion:
            self._planner.took(plan, 1e3 * self.last_step_seconds)
        self._step_seconds += self.last_step_seconds
        self._last_completion = now
        return deltas

    def constrained_rows(self, plan: StepPlan) -> list[ConstrainedRow] | None:
        """The constrained rows of a planned step whose results are still wanted; None while a token that one of their
        matchers must have first is in flight."""
        found: list[ConstrainedRow] = []
        for row in plan.constrained:
            seq = self._roster.slots.owner_of(plan, row)
            if seq is None or seq.prepared.matcher is None:
                continue
            if len(seq.tokens) < plan.starts[row] + plan.query_lens[row]:
                return None
            held = seq.generated < seq.params.min_tokens
            found.append(ConstrainedRow(row, seq.prepared.matcher, held, seq.params.stop_token_ids))
        return found

    @property
    def steps_completed(self) -> int:
        """Steps whose results are in, since the start."""
        return self._roster.slots.completed - self._given_up

    def give_up_steps(self) -> None:
        """Forget the steps in flight, whose results will not come, and what may rest on them: all that runs goes back
        to the queue, and no prompt stays cached. Nothing may run on the device."""
        self._given_up += len(self._in_flight)
        self._in_flight.clear()
        self._micro_batches.give_up()
        self._roster.slots.completed = self._planned
        self._memory.complete(self._planned)
        self._roster.requeue_all()
        self._memory.reset_prompt_cache()

    def limit_steps(self, tokens: int) -> None:
        """Plan steps of at most so many tokens from now on; only while nothing runs."""
        chunk = min(self._limits.prefill_chunk_tokens, tokens)
        self._limits = replace(self._limits, max_batch_tokens=tokens, prefill_chunk_tokens=chunk)
        self._planner.limits = self._limits

    def fail_newest(self, plan: StepPlan) -> list[RequestDelta]:
        """End the request that came last of those in a step in flight; returns its terminal delta."""
        owners = (self._roster.slots.owner_of(plan, row) for row in range(len(plan.slots)))
        found = [seq for seq in owners if seq is not None]
        if not found:
            return []
        newest = max(found, key=by_arrival)
        self._roster.end(newest)
        return [RequestDelta(newest.request_id, [], FinishReason.ERROR, OUT_OF_MEMORY)]

    def bound_steps(self, bound: StepBound | None, target: FirstTokenTarget | None = None) -> None:
        """From now on keep steps with decodes within a bound, and have prompts that cannot meet a target stand aside
        for those that can. None: no bound; first come, first served."""
        self._planner.bound_steps(bound, target)

    def reset_counters(self) -> None:
        """Count steps, their seconds, tokens and preemptions from now on."""
        self._steps_before = self.steps_completed
        self._step_seconds = 0.0
        self._roster.preemptions = 0
        self._reader.prompt_tokens = self._reader.generated_tokens = self._reader.cached_tokens = 0

    def reset_prompt_cache(self) -> None:
        """Forget cached prompts that no live request uses; only while no step is in flight."""
        if self._in_flight:
            raise RuntimeError("the prompt cache is reset while a step is in flight")
        self._memory.reset_prompt_cache()

    def stats(self, now: float) -> EngineStats:
        """A reading of the counters and of the KV memory. A draining sequence counts as running."""
        late, spec = len(self._roster.late), self._memory.spec
        waiting = len(self._roster.waiting) + late
        return EngineStats(
            time=now,
            running=len(self._roster.live) - waiting,
            waiting=waiting,
            slots=spec.num_slots,
            kv_granules_used=self._memory.used,
            kv_granules=spec.num_granules,
            granule_tokens=spec.granule_tokens,
            steps=self.steps_completed - self._steps_before,
            step_seconds=self._step_seconds,
            preemptions=self._roster.preemptions,
            prompt_tokens=self._reader.prompt_tokens,
            generated_tokens=self._reader.generated_tokens,
            cached_tokens=self._reader.cached_tokens,
            kv_granules_cached=self._memory.cache.idle,
            kv_granules_shared=self._memory.cache.shared,
            kv_tokens_unused=self._roster.unused_tokens,
            kv_granules_swapped=self._memory.swap.used,
            late=late,
        )

    def check(self) -> None:
        """Raise `RuntimeError` if the state contradicts itself. For tests and idle moments: visits every sequence."""
        invariants.check(self._roster, self._limits, self._memory)
