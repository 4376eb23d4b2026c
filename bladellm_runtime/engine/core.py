"""`EngineCore`: scheduler and runner joined into steps, a few of them in flight. No wire, no process."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from bladellm_runtime.engine.adapters import Adapters, NoAdapters
from bladellm_runtime.engine.arrival_hold import ArrivalHold
from bladellm_runtime.engine.constraints import Constraints
from bladellm_runtime.engine.launch_timer import LaunchTimer
from bladellm_runtime.engine.memory_recovery import MemoryRecovery
from bladellm_runtime.engine.preparation import RefusedError, WaitingRoom
from bladellm_runtime.engine.step_errors import DeviceLostError, StepMemoryError
from bladellm_runtime.engine.step_pacer import StepPacer
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.scheduler.admission import INVALID_REQUEST
from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget
from bladellm_runtime.scheduler.plan import StepPlan, StepResult, TokenMasks
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest, Delta, EngineStats, MoveAdapter, RequestDelta, front_end_of

PACED_STEPS = 2
"""In flight at once, where the second is planned only shortly before the first ends."""


class Runner(Protocol):
    """Executes step plans in order. `launch` must not wait for the step; `collect` waits for its result; `finished`
    says whether that is there; `add_stats` fills in what only the runner's memory knows. A plan with constrained rows
    is launched up to its logits: `sample` launches the rest before anything else is, and returns what takes the place
    of what `launch` returned. These three raise `StepMemoryError` for a step that has no result, after which `recover`
    is called once all others are collected, and `DeviceLostError` when there is no going on: then `abandon` takes the
    place of `close`, and lets go of what is not the device's. `queued` is called in a launch when the device has
    something of the step to begin with."""

    queued: Callable[[], object]

    def launch(self, plan: StepPlan) -> Any: ...

    def sample(self, launched: Any, masks: TokenMasks) -> Any: ...

    def collect(self, launched: Any) -> StepResult: ...

    def finished(self, launched: Any) -> bool: ...

    def recover(self) -> None: ...

    def add_stats(self, stats: EngineStats) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


class EngineCore:
    """Plans, launches and completes steps.

    With `overlap` the next step is planned and launched before the result of the one in flight is known: its decode
    rows read their token on the device. Without, one step runs at a time; both give the same tokens. With several
    micro-batches this holds of each of them, and their steps are in flight side by side.

    The masks of constrained rows need the tokens of the steps before. Such a step is launched up to its logits; while
    the device makes these, the results that its masks rest on come in, the masks are filled, and it is sampled: all in
    the `step` that launched it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool,
        micro_batches: int = 1,
        room: WaitingRoom | None = None,
        constraints: Constraints | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        """room: where requests wait for what they need before they are scheduled. constraints: fills the masks of those
        that have one, which it was given in the room. adapters: in the room too; None where requests must not name
        any."""
        self._scheduler = scheduler
        self._adapters: Adapters = adapters or NoAdapters()
        self._room = WaitingRoom([self._adapters]) if room is None else room  # an empty one is false
        scheduler.watch_ends(self._room.release)
        self._runner = runner
        runner.queued = self._note_queued
        self._depth = micro_batches + overlap
        self._in_flight: deque[tuple[StepPlan, Any]] = deque()
        self._constraints = constraints
        self._unsampled: StepPlan | None = None
        """The step launched last, while its masks are to come."""
        self.blocked = False
        """True when the last `step` found requests waiting, nothing to plan and nothing in flight."""
        self._pacer: StepPacer | None = None
        self.watch: Callable[[StepPlan, float], None] | None = None
        """Called with each completed step and the seconds that it took."""
        self._recovery: MemoryRecovery | None = None
        self._device_lost = False

    @property
    def idle(self) -> bool:
        """True when no request waits, is queued or running and no step is in flight."""
        return not self._in_flight and not self._scheduler.has_work and not self._room

    @property
    def preparing(self) -> bool:
        """True when no step is in flight and nothing is queued, while requests wait for what they need before that."""
        return bool(self._room) and not self._in_flight and not self._scheduler.has_work

    def add(self, request: AddRequest, prepared: Prepared | None = None) -> list[RequestDelta]:
        """Queue a request; a request that can never run is answered at once. prepared: what it needs, where it need not
        wait for that."""
        if self._pacer is not None:
            self._pacer.arrive()
        refusal = self._refusal(request)
        if refusal is None and (prepared is not None or not self._room.enter(request)):
            self._scheduler.accept(request, prepared)
        return [] if refusal is None else [refusal]

    def announce(self) -> None:
        """A request is to come soon."""
        if self._pacer is not None:
            self._pacer.announce(time.monotonic())

    def move_adapter(self, message: MoveAdapter) -> list[RequestDelta]:
        """Load an adapter, as a request for it does, or let go of one. What becomes of it is a terminal delta, here or
        of a later step."""
        request_id = message.request_id
        if request_id in self._room or request_id in self._scheduler.live_ids:
            return [RequestDelta(request_id, [], FinishReason.ERROR, INVALID_REQUEST)]
        if message.load:
            errand = AddRequest(request_id, [], SamplingParams(), 0, time.monotonic(), adapter=message.adapter)
            if self._room.enter(errand, errand=True):
                return []
            return [RequestDelta(request_id, [], FinishReason.ERROR, INVALID_REQUEST)]
        try:
            with self._noting_loss():
                self._adapters.unload(message.adapter)
        except RefusedError as error:
            return [RequestDelta(request_id, [], FinishReason.ERROR, error.code, message=error.sentence)]
        return [RequestDelta(request_id, [], FinishReason.STOP)]

    def abort(self, request_ids: Sequence[int]) -> list[RequestDelta]:
        """End requests now; returns their terminal deltas."""
        return self._room.abort(request_ids) + self._scheduler.abort(request_ids)

    def abort_front_end(self, front_end: int) -> list[RequestDelta]:
        """End every request of a front end now; returns their terminal deltas."""
        live = [*self._room.request_ids, *self._scheduler.live_ids]
        return self.abort([item for item in live if front_end_of(item) == front_end])

    def step(self) -> list[Delta]:
        """Launch the next step if there is one, then complete the oldest in flight if it is due.

        Raises `DeviceLostError` when the device can do no more, `StepMemoryError` when no step fits into its memory.
        """
        with self._noting_loss():
            deltas: list[Delta] = [*self._let_in()] if self._room else []
            return deltas + self._step_or_recover()

    @contextmanager
    def _noting_loss(self) -> Iterator[None]:
        """Around what may find that the device is lost: steps, but also who moves adapters or looks at other ranks."""
        try:
            yield
        except DeviceLostError:
            self._device_lost = True
            raise

    def _step_or_recover(self) -> list[Delta]:
        deltas: list[Delta] = []
        try:
            self._step(deltas)
        except StepMemoryError as error:
            if self._recovery is None:
                raise
            deltas += self._recover(self._recovery, error)
        return deltas

    def _refusal(self, request: AddRequest) -> RequestDelta | None:
        if request.request_id in self._room:
            return RequestDelta(request.request_id, [], FinishReason.ERROR, INVALID_REQUEST)
        return self._scheduler.refusal(request)

    def _let_in(self) -> list[RequestDelta]:
        """Hand the requests that are prepared to the scheduler; returns what became of the others that left."""
        deltas = self._room.poll()
        for request, prepared in self._room.ready:
            refusal = self._scheduler.add(request, prepared)
            if refusal is not None:
                deltas.append(refusal)
                self._room.release(request.request_id)
        self._room.ready.clear()
        return deltas

    def _step(self, deltas: list[Delta]) -> None:
        """`step`, without what comes before and after; adds to `deltas` what was completed, also where it raises."""
        plans = self._pacer is None or self._pacer.plans(time.monotonic(), self._front)
        plan = self._scheduler.plan() if plans else None
        if plan is not None:
            self._launch(plan)
        self.blocked = plans and not self._in_flight and self._scheduler.has_work
        if self._unsampled is not None and len(self._in_flight) == 1:
            self._sample(self._unsampled, deltas)
        if self._in_flight and (plan is None or len(self._in_flight) == self._depth):
            deltas += self._complete_oldest()
        if self._unsampled is not None:
            self._sample(self._unsampled, deltas)

    def _sample(self, plan: StepPlan, deltas: list[Delta]) -> None:
        """Sample the step launched last, once the tokens that its masks rest on are there.

        They mostly are: the step that brings them has just been completed. Only one of several micro-batches whose
        others have nothing to run has that step still in flight, and it is completed here.
        """
        while (rows := self._scheduler.constrained_rows(plan)) is None:
            assert len(self._in_flight) > 1, "the masks of a step rest on steps before it"
            deltas += self._complete_oldest()
        assert self._constraints is not None, "constrained requests come from the room"
        masks = self._constraints.fill(rows)
        self._in_flight[-1] = (plan, self._runner.sample(self._in_flight[-1][1], masks))
        self._unsampled = None

    def survive_full_memory(self) -> None:
        """Go on, with smaller steps, when one runs out of memory; without this `step` raises."""
        self._recovery = MemoryRecovery(self._scheduler)

    def pace(self, timer: LaunchTimer, hold: ArrivalHold | None = None) -> None:
        """From now on plan steps as late as the timer says, and later where `hold` has them wait.

        Only where two steps are in flight at once.
        """
        assert self._depth == PACED_STEPS
        self._pacer = StepPacer(timer, hold, self._scheduler)

    def spare_seconds(self) -> float:
        """How long the next `step` can be left, for requests that arrive meanwhile, without the device waiting."""
        left = 0.0 if self._pacer is None else self._pacer.spare(time.monotonic(), self._front)
        return 0.0 if left > 0 and self._front_ended() else left

    @property
    def _front(self) -> StepPlan | None:
        """The step launched last, while it is in flight."""
        return self._in_flight[-1][0] if self._in_flight else None

    def _front_ended(self) -> bool:
        """Whether that step is in flight, and the device is done with it."""
        return bool(self._in_flight) and self._runner.finished(self._in_flight[-1][1])

    def _launch(self, plan: StepPlan) -> None:
        launched = self._runner.launch(plan)
        self._note_queued()
        if self._pacer is not None:
            self._pacer.launched(plan, self._front)
        self._in_flight.append((plan, launched))
        self._unsampled = plan if plan.constrained else None

    def _note_queued(self) -> None:
        if self._pacer is not None and self._pacer.launching:
            ended = self._front_ended()
            self._pacer.queued(time.monotonic(), ended)

    def _complete_oldest(self) -> list[Delta]:
        # A step whose result cannot be read stays: `_recover` finds it there.
        plan, launched = self._in_flight[0]
        seen = self._pacer is None or not self._runner.finished(launched)
        result = self._runner.collect(launched)
        self._in_flight.popleft()
        now = time.monotonic()
        if self._pacer is not None:
            self._pacer.completed(plan, now, seen or not self._in_flight)
        deltas = self._scheduler.complete(plan, result, now)
        if self.watch is not None:
            self.watch(plan, self._scheduler.last_step_seconds)
        return deltas

    def _recover(self, recovery: MemoryRecovery, error: StepMemoryError) -> list[Delta]:
        """Complete the steps before the one without a result, drop those behind it, and let the recovery go on."""
        deltas: list[Delta] = []
        with suppress(StepMemoryError):
            while self._in_flight and self._in_flight[0][0] is not self._unsampled:
                deltas += self._complete_oldest()
        self._unsampled = None
        while self._in_flight:
            _, launched = self._in_flight.popleft()
            with suppress(StepMemoryError):
                self._runner.collect(launched)
        self._runner.recover()
        return deltas + recovery.recover(error)

    def bound_steps(self, bound: StepBound | None, target: FirstTokenTarget | None = None) -> None:
        """Keep steps with decodes within a bound from now on, and have prompts that are late for a target stand aside;
        None: neither."""
        self._scheduler.bound_steps(bound, target)

    def reset_counters(self) -> None:
        """Count steps and tokens from now on; only while idle."""
        self._scheduler.reset_counters()

    def stats(self, now: float) -> EngineStats:
        """A reading of the scheduler's and the memory's state. Raises `DeviceLostError`."""
        stats = self._scheduler.stats(now)
        with self._noting_loss():
            self._runner.add_stats(stats)
            self._adapters.add_stats(stats)
        if self._constraints is not None:
            self._constraints.add_stats(stats)
        return stats

    def reset_prompt_cache(self) -> None:
        """Forget cached prompts that no running request uses."""
        self._scheduler.reset_prompt_cache()

    def check(self) -> None:
        """Raise `RuntimeError` if the scheduler's state contradicts itself. For tests and idle moments."""
        self._scheduler.check()

    def close(self) -> None:
        """Wait for the steps in flight, then release the runner's memory; a lost device keeps what it has."""
        if self._constraints is not None:
            self._constraints.close()
        try:
            if not self._device_lost:
                self._finish_steps()
        finally:
            if self._device_lost:
                self._runner.abandon()
            else:
                self._adapters.close()
                self._runner.close()

    def _finish_steps(self) -> None:
        with self._noting_loss():
            if self._unsampled is not None:
                self._sample(self._unsampled, [])
            while self._in_flight:
                _, launched = self._in_flight.popleft()
                self._runner.collect(launched)
