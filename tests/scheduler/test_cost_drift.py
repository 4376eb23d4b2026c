"""What steps cost is followed while they run: a GPU under load is slower than the idle one that was measured."""

import random
from dataclasses import replace

import pytest

from bladellm_runtime.scheduler import cost_drift
from bladellm_runtime.scheduler.cost_drift import LEAST, LEAST_TOKENS, MOST, CostDrift
from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad, chunk_pairs
from tests.scheduler.test_planning import endless, simulation

COST = StepCost(step=2.2, token=0.017, decode_row=0.003, decode_kv=3e-5, prefill_pair=7e-7, sizes=(512, 1024, 2048))


def random_load(tokens: int | None = None) -> StepLoad:
    rows = random.randint(0, 60)
    tokens = tokens or random.randint(LEAST_TOKENS, 1900)
    return StepLoad(rows, 600 * rows, tokens, chunk_pairs(random.randint(0, 2000), tokens))


def slower(factor: float) -> StepCost:
    return replace(COST, token=COST.token * factor, prefill_pair=COST.prefill_pair * factor)


def test_it_comes_to_what_tokens_take_whatever_some_steps_are_seen_to_take():
    drift, factor = CostDrift(), random.uniform(0.87, 1.45)
    for _ in range(400):
        load = random_load()
        seen = slower(factor).milliseconds(load) * random.gauss(1.0, 0.02)
        if random.random() < 0.1:
            seen *= random.choice([0.3, 4.0])
        drift.note(COST, load, seen)
    assert drift.factor == pytest.approx(factor, rel=0.04)
    load = random_load()
    assert drift.applied(COST).milliseconds(load) == pytest.approx(slower(factor).milliseconds(load), rel=0.04)
    assert drift.applied(COST).decode_milliseconds(0, 0) == COST.step


def test_it_ends_somewhere():
    for seen, end in ((0.0, LEAST), (1e9, MOST)):
        drift = CostDrift()
        changes = [drift.note(COST, random_load(), seen) for _ in range(500)]
        assert drift.factor == end
        assert changes[0]
        assert not changes[-1]


def test_short_prompts_and_steps_that_the_host_launches_say_nothing():
    drift = CostDrift()
    for tokens in (1, LEAST_TOKENS - 1, 2049, 8000):
        assert not drift.note(COST, random_load(tokens), 1e6)
    assert drift.note(replace(COST, sizes=()), random_load(8000), 1e6)


def test_a_scheduler_follows_steps_that_begin_as_others_end():
    """The clock of a simulation goes on by one at each launch and each completion."""
    sim = simulation(depth=2, max_batch_tokens=300, prefill_chunk_tokens=300, max_model_len=20000, num_granules=5000)
    planner = sim.scheduler._planner
    cost = StepCost(step=1.0, token=1.0, decode_row=0.0, decode_kv=0.0, prefill_pair=0.0)
    sim.scheduler.bound_steps(StepBound(1e6, cost), FirstTokenTarget(1e6, cost))
    endless(sim, 300, 1)
    sim.finish()
    assert planner.bound.cost == cost, "nothing was in front of it"
    endless(sim, 300 * 12, 1)
    sim.finish()
    # 1 or 2 s a step, and 301 ms were expected.
    assert planner.bound.cost.token > 1.04
    assert planner.bound.cost == planner.target.cost
    sim.scheduler.bound_steps(StepBound(1e6, cost))
    assert planner.bound.cost == cost, "given anew"
    sim.scheduler.bound_steps(None)
    endless(sim, 300 * 4, 1)
    sim.finish()
    assert planner.bound is None
    assert planner.target is None


def test_a_line_of_an_idle_device_keeps_the_bound_under_load(simulate_policy, monkeypatch):
    """17.3 µs a token at start, 20.3 under load: chunks were a size too large for the bound."""
    under_load = replace(simulate_policy.COST, token=0.0203)
    idle = StepBound(14.0, replace(under_load, token=0.0173))

    def percentiles() -> tuple[float, ...]:
        engine = simulate_policy.SimulatedEngine(idle, launch_ahead=1.5, cost=under_load)
        return engine.run(simulate_policy.poisson(16, 700, 1), 128).percentiles()

    followed = percentiles()
    monkeypatch.setattr(cost_drift, "GAIN", 0.0)
    fixed = percentiles()
    assert followed[3] < 0.95 * fixed[3]
    assert followed[0] < 1.02 * fixed[0]
