"""A full step lets the next request in without a row of it: its memory is mapped while the step runs."""

import random
from collections import deque

import numpy as np

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import Show
from bladellm_runtime.request import FinishReason, SamplingParams
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest
from tests.scheduler.fake_device import limits_of, spec_of
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_planning import endless, rows, simulation


def shown(views, slot: int) -> list[int]:
    return [granule for view in views if view.slot == slot for granule in view.granules]


def let_in(sim, plan) -> set[int]:
    """Slots mapped for a sequence that has no part in the plan yet: not the next ones, which are prepared for none."""
    return {view.slot for view in plan.memory.views} - set(sim.memory.idle_slots) - set(plan.slots.tolist())


def test_the_next_request_is_mapped_ahead_and_loaded_with_its_first_rows():
    sim = simulation(max_batch_tokens=8)
    for length in (8, 6, 5, 5, 5, 5):
        endless(sim, length, 4)
    first = sim.launch()
    assert rows(first) == [(0, 8, True)]
    assert [load.choice for load in first.loads] == [0]
    # No more than the next two steps have tokens for, but for the last.
    ahead = let_in(sim, first)
    assert len(ahead) == 3
    assert ahead.isdisjoint(first.slots)
    # Five or six tokens of the prompt and the first of the answer.
    assert [len(shown(first.memory.views, slot)) for slot in ahead] == [2, 2, 2]
    sim.complete()
    second = sim.launch()
    assert len(second.loads) == 2
    assert {load.slot for load in second.loads} < ahead
    assert not any(shown(second.memory.views, slot) for slot in ahead)
    sim.complete()
    sim.finish()


class Always:
    """In place of chance."""

    def __init__(self, number: float) -> None:
        self.number = number

    def random(self) -> float:
        return self.number


AT_ONCE, LATE = Always(1.0), Always(0.0)
"""Views that no row enters are made before the next plan, or after the one after it."""


def decoding(requests: int, mapping: Always = AT_ONCE, **limits: int) -> Simulation:
    """One whose memory is mapped beside the steps, with so many requests that decode."""
    limits = limits_of(**limits)
    sim = Simulation(limits, spec_of(4, 100, 8, limits.max_model_len), background=True)
    sim.device.memory.random = mapping
    for _ in range(requests):
        endless(sim, 7, 30)
    for _ in range(3):
        sim.step()
    return sim


def test_decode_rows_do_not_wait_for_the_memory_of_new_prompts():
    """The next slot is prepared for a request like those before; a longer one, and who comes behind it, begin a step
    later."""
    sim = decoding(2)
    endless(sim, 6, 4)
    plan = sim.launch()
    assert rows(plan)[2:] == [(0, 6, True)], "its memory was there"
    sim.complete()
    endless(sim, 30, 4)
    endless(sim, 6, 4)
    plan = sim.launch()
    assert (plan.num_decode, len(plan.slots)) == (3, 3)
    assert let_in(sim, plan)
    sim.complete()
    plan = sim.launch()
    assert rows(plan)[3:] == [(0, 30, True), (0, 6, True)]
    assert not plan.memory.views
    sim.complete()
    sim.finish()


def test_decode_rows_do_not_wait_where_mapping_takes_several_steps():
    sim = decoding(2, LATE)
    endless(sim, 30, 20)
    endless(sim, 20, 20)
    for _ in range(2):
        assert len(sim.launch().slots) == 2
        sim.complete()
    assert rows(sim.launch())[2:] == [(0, 30, True), (0, 20, True)]
    sim.complete()
    for _ in range(20):
        # Each grows by granules of 4 tokens, and steps are not held up by any.
        assert sim.launch().num_decode >= 2
        sim.complete()
    sim.finish()


def test_who_begins_later_has_the_tokens_of_the_next_step():
    sim = decoding(1, max_batch_tokens=16)
    for _ in range(5):
        endless(sim, 12, 4)
    assert rows(sim.launch())[1:] == []
    sim.complete()
    prompts = []
    while sim.scheduler.has_prompts:
        plan = sim.launch()
        prompts.append(int(plan.query_lens[plan.num_decode :].sum()))
        sim.complete()
    assert sum(prompts) == 60
    assert len(prompts) == 5, "steps were not filled with prompts"
    sim.finish()


class SlowMapping:
    """Shows granules one after the other while steps run, and at once those that a step enters."""

    def __init__(self, granule_tokens: int, per_token: float) -> None:
        """per_token: granules in the time that a step takes for a token."""
        self._granule_tokens, self._per_token = granule_tokens, per_token
        self._waiting: deque[tuple[int, int]] = deque()
        self._credit = 0.0

    def submit(self, plan: StepPlan) -> None:
        """Ask for a step's views."""
        ends = dict(zip(plan.slots.tolist(), (plan.starts + plan.query_lens).tolist(), strict=True))
        views = (view for view in (*plan.memory.views, *plan.memory.ahead) if isinstance(view, Show))
        self._waiting += [(view.slot, view.position + place) for view in views for place in range(len(view.granules))]
        self._waiting = deque(one for one in self._waiting if one[1] * self._granule_tokens >= ends.get(one[0], 0))

    def go_on(self, tokens: int) -> None:
        """While a step of so many tokens runs."""
        self._credit = min(self._credit, 1.0) + self._per_token * tokens
        while self._waiting and self._credit >= 1:
            self._waiting.popleft()
            self._credit -= 1

    def is_shown(self, slot: int, granules: int) -> bool:
        return not any(one[0] == slot and one[1] < granules for one in self._waiting)


def steps_with_prompts(requests: int, prompt: int, step: int) -> list[int]:
    """Tokens of them, where mapping takes half as long as the steps, of which two are in flight."""
    spec = spec_of(4, 10_000, requests, 2 * prompt)
    mapping = SlowMapping(spec.granule_tokens, 2 * spec.granules(prompt + 1) / prompt)
    memory = KvAccounting(spec, prompt_cache=False, progress=mapping)
    scheduler = Scheduler(limits_of(step, step, max_model_len=2 * prompt), memory, lambda: 0.0)
    for request in range(requests):
        scheduler.add(AddRequest(request, [1] * prompt, SamplingParams(max_tokens=4, ignore_eos=True), 0, 0.0))
    found: list[int] = []
    in_flight: deque[StepPlan] = deque()
    while not scheduler.idle:
        plan = scheduler.plan()
        if plan is not None:
            mapping.submit(plan)
            in_flight.append(plan)
            found.append(int(plan.query_lens[plan.num_decode :].sum()))
        if plan is None or len(in_flight) == 2:
            done = in_flight.popleft()
            mapping.go_on(int(done.query_lens.sum()))
            scheduler.complete(done, StepResult(np.ones(len(done.slots), np.int64)), 0.0)
    return [tokens for tokens in found if tokens]


def test_a_short_step_does_not_make_every_other_one_short():
    """Nothing is mapped yet when the first step begins, and the second is planned with it."""
    found = steps_with_prompts(requests=random.randint(100, 300), prompt=random.randint(50, 70), step=1024)
    assert min(found[1:-1]) > 0.9 * 1024


def test_prompts_begin_at_once_where_nothing_decodes():
    sim = decoding(0)
    endless(sim, 12, 4)
    endless(sim, 9, 4)
    plan = sim.launch()
    assert rows(plan) == [(0, 12, True), (0, 9, True)]
    assert {view.slot for view in plan.memory.views} == set(plan.slots.tolist())
    sim.complete()
    sim.finish()


def test_only_one_request_waits_with_memory():
    sim = simulation(max_batch_tokens=4, num_granules=40)
    for _ in range(6):
        endless(sim, 12, 3)
    while not sim.scheduler.idle:
        sim.launch()
        assert sum(not seq.loaded for seq in sim.scheduler._roster.prefilling) <= 1
        sim.complete()


def test_a_request_that_leaves_before_its_first_row_gives_its_memory_back_after_the_step():
    sim = simulation(max_batch_tokens=8)
    endless(sim, 8, 4)
    second = endless(sim, 6, 4)
    plan = sim.launch()
    (slot,) = let_in(sim, plan)
    held = sim.memory.used
    deltas = sim.abort([second])
    assert deltas is None or [delta.finish for delta in deltas] == [FinishReason.ABORT]
    assert sim.memory.used == held, "memory was given away under a step in flight"
    sim.complete()
    assert sim.memory.used < held
    assert slot in sim.memory.idle_slots
    sim.finish()


def test_nothing_is_let_in_ahead_where_there_is_no_room():
    sim = simulation(max_batch_tokens=8, num_granules=4)
    endless(sim, 8, 4)
    endless(sim, 8, 4)
    plan = sim.launch()
    assert not let_in(sim, plan)
    assert len(sim.scheduler._roster.waiting) == 1
    sim.complete()
    sim.finish()
