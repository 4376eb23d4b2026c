"""A scheduler on a fake device, and the front end that it answers: each delta is checked against what must come."""

from collections import Counter

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import Show
from bladellm_runtime.kv.shared_reads import SharingRule
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.micro_batches import MicroBatches
from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan
from bladellm_runtime.scheduler.policy import SHORTER
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest, RequestDelta, one_by_one
from tests.kv.fake_memory import FakeMemory
from tests.scheduler.fake_device import FakeDevice, expected_answer

ANY_GROUP = SharingRule(members=2, least_rows=1, most_rows=1000, step_tokens=1, group_tokens=1)


class Simulation:
    """A scheduler and a fake device with up to `depth` steps in flight, and what the front end got from them.

    Request ids count up in arrival order; `choice` repeats them so that loads can be told apart.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        spec: KvSpec,
        depth: int = 1,
        *,
        shares: bool = True,
        prompt_cache: bool = True,
        background: bool = False,
        seed: int = 0,
        sharing: SharingRule | None = ANY_GROUP,
        groups: int = 1,
    ) -> None:
        """depth: of one micro-batch; with several one step more in flight for each."""
        self.limits, self.spec, self.depth = limits, spec, depth + groups - 1
        self.each, self.groups = depth, groups
        memory = FakeMemory(spec, shares=shares, seed=seed)
        self.progress = memory if background and shares else None
        self.memory = KvAccounting(spec, shares=shares, prompt_cache=prompt_cache, progress=self.progress)
        self.now = 0.0
        micro_batches = MicroBatches(groups, depth) if groups > 1 else None
        self.scheduler = Scheduler(limits, self.memory, lambda: self.now, sharing, micro_batches)
        self.requests: dict[int, AddRequest] = {}
        self.deltas: dict[int, list[RequestDelta]] = {}
        self.aborted: set[int] = set()
        self._live: dict[int, None] = {}
        self.loaded: list[int] = []
        self.protected: set[int] = set()
        self.device = FakeDevice(limits, spec, self.requests, memory, self.running_slots)

    @property
    def live(self) -> list[int]:
        return list(self._live)

    def running_slots(self) -> list[int]:
        """Slots of sequences that have KV there already, and will read it again."""
        return [seq.slot for seq in self.scheduler._roster.running() if seq.loaded]

    def add(self, prompt: list[int], *, salt: str = "", **params: object) -> int:
        request_id = len(self.requests)
        request = AddRequest(request_id, prompt, SamplingParams(**params), request_id, self.now, salt)
        self.requests[request_id] = request
        self.deltas[request_id] = []
        self._live[request_id] = None
        refusal = self.scheduler.add(request)
        if refusal is not None:
            self._receive([refusal])
        return request_id

    def abort(self, request_ids: list[int]) -> list[RequestDelta]:
        expected = [i for i in request_ids if i in self.live]
        deltas = self.scheduler.abort(request_ids)
        assert [delta.request_id for delta in deltas] == expected
        assert all(delta.finish is FinishReason.ABORT and not delta.tokens for delta in deltas)
        self.aborted |= set(expected)
        self._receive(deltas)
        return deltas

    def launch(self) -> StepPlan | None:
        """Plan and launch a step, if one more may be in flight and there is one."""
        if len(self.device.in_flight) == self.depth:
            return None
        self.now += 1.0
        plan = self.scheduler.plan()
        if plan is None:
            assert self.device.in_flight or not self.live, "requests wait, nothing runs: stalled"
            return None
        self._check_order(plan)
        self._check_slots(plan)
        if self.progress is not None:
            self._check_views(plan, self.progress)
        self.device.launch(plan)
        return plan

    def complete(self) -> list[RequestDelta]:
        """Complete the oldest step in flight, if any."""
        if not self.device.in_flight:
            return []
        self.now += 1.0
        deltas = list(one_by_one(self.scheduler.complete(*self.device.collect(), self.now)))
        self._receive(deltas)
        return deltas

    def step(self) -> list[RequestDelta]:
        """What the engine loop does: launch, then complete if as many are in flight as may be, or none was launched."""
        plan = self.launch()
        return self.complete() if plan is None or len(self.device.in_flight) == self.depth else []

    def finish(self) -> int:
        """Step until idle; returns the steps taken, fails if that takes longer than without starvation."""
        # Each request in its turn is the oldest; then it waits at most for those that fill the step now, prefills and
        # decodes token by token, and loses at most `depth` steps to each growth.
        bound = 10 + len(self.live) * self.limits.max_model_len * (3 + 2 * self.depth)
        steps = 0
        while not self.scheduler.idle:
            self.step()
            steps += 1
            assert steps <= bound, "starvation"
        self.check_all()
        return steps

    def tokens(self, request_id: int) -> list[int]:
        return [token for delta in self.deltas[request_id] for token in delta.tokens]

    def check(self) -> None:
        """What holds between any two calls."""
        self.scheduler.check()
        assert self.scheduler.has_work == bool(self.live)
        stats = self.scheduler.stats(self.now)
        assert stats.running + stats.waiting == len(self.live)
        assert stats.kv_granules_used <= stats.kv_granules
        if self.scheduler.idle:
            assert self.memory.used == 0
            assert self.memory.live == 0

    def check_all(self) -> None:
        """Every request ended once, with the answer it would have had alone."""
        self.check()
        assert not self.live
        for request_id in self.requests:
            self._check_answer(request_id)

    def _check_answer(self, request_id: int) -> None:
        request, deltas = self.requests[request_id], self.deltas[request_id]
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        if deltas[-1].error in ("context_length_exceeded", "invalid_request"):
            assert len(deltas) == 1
            return
        tokens, finish = expected_answer(request, self.limits, self.spec)
        got = self.tokens(request_id)
        if request_id in self.aborted:
            assert got == tokens[: len(got)]
        else:
            assert (got, deltas[-1].finish) == (tokens, finish)
            assert (deltas[-1].error == "invalid_logits") == (finish is FinishReason.ERROR)
        self._check_extras(request, deltas)

    def _check_extras(self, request: AddRequest, deltas: list[RequestDelta]) -> None:
        """Log-probabilities and the time of scheduling come once each, with the right delta."""
        answered = [delta for delta in deltas if delta.finish is not FinishReason.ABORT]
        assert all(delta.scheduled_at is None and delta.prompt_logprobs is None for delta in answered[1:])
        for delta in answered[:1]:
            assert request.arrival < delta.scheduled_at <= self.now
            cached = self.device.first_start[request.request_id]
            assert delta.cached_tokens == cached < len(request.prompt) or len(self.tokens(request.request_id)) == 0
            positions = [p.logprobs[0] for p in delta.prompt_logprobs or []]
            wanted = request.params.prompt_logprobs is not None
            assert (delta.prompt_logprobs is not None) == wanted
            assert positions == [float(p) for p in range(1, len(request.prompt)) if wanted]
        entries = [entry for delta in deltas for entry in delta.logprobs or []]
        if request.params.logprobs is None:
            assert not entries
        else:
            positions = [float(len(request.prompt) + i) for i in range(len(entries))]
            assert [e.logprobs[0] for e in entries] == positions
            assert [e.token_ids[0] for e in entries] == self.tokens(request.request_id)

    def _check_order(self, plan: StepPlan) -> None:
        """First come, first served, but for short prompts behind a long one, and for those who are late; and what was
        once the oldest is never loaded again."""
        live, begun = self._live, {*self.device.first_start}
        for load in plan.loads:
            assert load.choice in live, "an ended request is loaded"
            assert load.choice not in self.protected, "the oldest was preempted"
            older = [other for other in live if other < load.choice and other not in begun and not self._is_late(other)]
            if load.choice not in begun and older:
                assert self._is_short(plan, load), "a request overtook another"
            begun.add(load.choice)
            self.loaded.append(load.choice)
        oldest = next(iter(live), -1)
        if oldest in begun:
            self.protected.add(oldest)
        running = {slot: load.choice for slot, load in self.device.loads.items()}
        running |= {load.slot: load.choice for load in plan.loads}
        decodes = [running[slot] for slot in plan.slots[: plan.num_decode]]
        assert decodes == sorted(decodes), "decode rows are not oldest first"
        assert all(running[slot] in live for slot in plan.slots), "a row is planned for an ended request"

    def _is_late(self, request_id: int) -> bool:
        return self.scheduler._roster.live[request_id].late

    def _is_short(self, plan: StepPlan, load: SlotLoad) -> bool:
        """Whether an older prompt has a chunk in the plan, of which much more is left."""
        loads = self.device.loads | {each.slot: each for each in plan.loads}
        chunks = zip(plan.slots[plan.num_decode :], plan.starts[plan.num_decode :], strict=True)
        left = {loads[slot].choice: len(loads[slot].ids()) - start for slot, start in chunks}
        return any(choice < load.choice and SHORTER * left[load.choice] < tokens for choice, tokens in left.items())

    def _check_slots(self, plan: StepPlan) -> None:
        """No slot is in more steps in flight than it is with one micro-batch."""
        times = Counter(slot for earlier, _ in self.device.in_flight for slot in earlier.slots)
        assert all(times[slot] < self.each for slot in plan.slots)

    def _check_views(self, plan: StepPlan, progress: FakeMemory) -> None:
        """A decode row waits for no view of a chunk, and for one of a decode row where all of these have to wait."""
        own = [(view.slot, view.position) for view in plan.memory.views if isinstance(view, Show)]
        waits = []
        for slot, start, length in zip(plan.slots, plan.starts, plan.query_lens, strict=True):
            granules = self.spec.granules(int(start + length))
            made = progress.is_shown(slot, granules)
            waits.append(not made or any(view == slot and position < granules for view, position in own))
        if plan.num_decode and self.groups == 1:
            decodes, chunks = waits[: plan.num_decode], waits[plan.num_decode :]
            assert not any(chunks)
            assert not any(decodes) or all(decodes)

    def _receive(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            assert delta.request_id in self._live, "a delta after the terminal one"
            self.deltas[delta.request_id].append(delta)
            if delta.finish is not None:
                del self._live[delta.request_id]
