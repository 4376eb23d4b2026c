"""Short prompts behind a long one: who may overtake, and what the long one keeps."""

import random

import pytest

from bladellm_runtime.scheduler.plan import StepPlan
from bladellm_runtime.scheduler.planner import Planner
from bladellm_runtime.scheduler.policy import OVERTAKING_SHARE, SHORTER
from bladellm_runtime.scheduler.prefill_budget import StepBound
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_planning import endless, simulation

STEP = 16
ROOM = {"max_batch_tokens": STEP, "prefill_chunk_tokens": STEP, "max_model_len": 400, "num_granules": 1000}


class Chunks:
    """Prompt tokens of each step by request, of requests whose slots it learns from the loads."""

    def __init__(self, sim: Simulation) -> None:
        self._sim, self._choices = sim, {}

    def next(self) -> dict[int, int]:
        """Of a step that is launched and completed."""
        plan = self._sim.launch()
        found = {} if plan is None else self.of(plan)
        self._sim.complete()
        return found

    def of(self, plan: StepPlan) -> dict[int, int]:
        self._choices |= {load.slot: load.choice for load in plan.loads}
        prompts = slice(plan.num_decode, None)
        choices = [self._choices[slot] for slot in plan.slots[prompts]]
        return dict(zip(choices, plan.query_lens[prompts].tolist(), strict=True))


def first_tokens(sim: Simulation) -> list[int]:
    """Requests in the order of their first tokens."""
    order: list[int] = []
    while not sim.scheduler.idle:
        order += [delta.request_id for delta in sim.step() if delta.tokens and delta.request_id not in order]
    sim.check_all()
    return order


def test_a_short_prompt_goes_in_beside_the_long_one_in_front():
    sim = simulation(**ROOM)
    chunks, long = Chunks(sim), endless(sim, 200, 1)
    assert chunks.next() == {long: STEP}
    short = endless(sim, 6, 1)
    assert chunks.next() == {long: STEP - 6, short: 6}
    assert sim.tokens(short)
    assert chunks.next() == {long: STEP}
    assert first_tokens(sim) == [long]


@pytest.mark.parametrize(("front", "behind"), [(200, 95), (200, 150), (200, 200), (STEP + 12, 3)])
def test_a_prompt_not_much_shorter_or_behind_one_that_ends_now_waits_its_turn(front, behind):
    sim = simulation(**ROOM)
    chunks, first = Chunks(sim), endless(sim, front, 1)
    chunks.next()
    second = endless(sim, behind, 1)
    assert next(iter(chunks.next().items())) == (first, min(front - STEP, STEP))
    order = first_tokens(sim)
    assert sim.tokens(second)
    assert order in ([], [first, second]), "both at once, or one after the other"


def test_those_that_overtake_share_half_in_the_order_of_their_arrival():
    sim = simulation(**ROOM)
    chunks, long = Chunks(sim), endless(sim, 300, 1)
    chunks.next()
    one, two, three, four = (endless(sim, length, 1) for length in (5, 20, 5, 5))
    half = STEP // OVERTAKING_SHARE
    assert chunks.next() == {one: 5, two: 3, long: half}
    assert chunks.next() == {two: 8, long: half}
    assert chunks.next() == {two: 8, long: half}
    assert chunks.next() == {two: 1, three: 5, four: 2, long: half}
    assert chunks.next() == {four: 3, long: STEP - 3}
    assert first_tokens(sim) == [long]


@pytest.mark.parametrize("depth", [1, 2])
def test_however_many_overtake_the_front_takes_twice_as_many_steps_at_most(depth):
    rng, tokens = random.Random(), 320
    sim = simulation(depth, **ROOM)
    long, steps = endless(sim, tokens, 1), 0
    while not sim.tokens(long):
        for _ in range(3):
            endless(sim, rng.randrange(1, 9), 1)
        sim.step()
        steps += 1
    assert 1.5 * tokens / STEP < steps <= OVERTAKING_SHARE * tokens / STEP + depth
    sim.finish()


def test_what_came_later_never_gets_more_than_its_share_before_what_is_much_longer():
    rng, sim = random.Random(), simulation(2, **ROOM)
    chunks, overtaken = Chunks(sim), 0
    for step in range(400):
        if rng.random() < 0.3 and step < 300:
            endless(sim, rng.choice((1, 3, 8, 40, 200)), rng.choice((1, 4)))
        left = {request: len(sim.requests[request].prompt) for request in sim.live}
        plan = sim.launch()
        taken = chunks.of(plan) if plan is not None else {}
        for request, start in zip(taken, plan.starts[plan.num_decode :].tolist() if taken else (), strict=True):
            left[request] -= start
        front = min(taken, default=-1)
        later = [request for request in taken if request != front]
        if later and taken[front] < left[front]:
            overtaken += 1
            assert sum(taken[request] for request in later) <= (STEP - plan.num_decode) // OVERTAKING_SHARE
            assert all(SHORTER * left[request] < left[front] for request in later)
        sim.complete()
    assert overtaken > 10
    sim.finish()


def test_prompts_of_very_different_lengths_wait_less(simulate_policy, monkeypatch):
    """With measured step times."""
    arrivals = simulate_policy.poisson(20, 400, 1, simulate_policy.lengths(600, spread=1.0))

    def run() -> tuple[float, ...]:
        engine = simulate_policy.SimulatedEngine(StepBound(14.0, simulate_policy.COST), launch_ahead=1.5)
        return engine.run(arrivals, 128).percentiles()

    ttft, ttft90, _, longest = run()
    monkeypatch.setattr(Planner, "_overtake", lambda self, plan, budget, now: budget)
    before = run()
    assert ttft < before[0]
    assert ttft90 < 0.95 * before[1]
    assert longest < 1.25 * before[3]
