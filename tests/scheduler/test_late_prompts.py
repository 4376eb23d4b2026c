"""Prompts that cannot have their first token in time stand aside for those that can, and nobody waits for ever."""

import random
from dataclasses import replace
from math import inf

import pytest

from bladellm_runtime.scheduler.late_prompts import PATIENCE, FirstTokenTarget, StepRoom, seconds_to_first_token
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.step_cost import StepCost
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_overtaking import Chunks, first_tokens
from tests.scheduler.test_planning import endless, simulation

STEP = 16
ROOM = {"max_batch_tokens": STEP, "prefill_chunk_tokens": STEP, "max_model_len": 400, "num_granules": 1000}
A_SECOND_A_STEP = StepCost(step=1000.0, token=0.0, decode_row=0.0, decode_kv=0.0, prefill_pair=0.0)
"""The clock of a simulation goes on by one at each launch and at each completion."""


def with_target(seconds: float, **room: int) -> Simulation:
    sim = simulation(**{**ROOM, **room})
    sim.scheduler.bound_steps(None, FirstTokenTarget(seconds, A_SECOND_A_STEP))
    return sim


def late(sim: Simulation) -> int:
    return sim.scheduler.stats(sim.now).late


def busy(sim: Simulation, tokens: int, steps: int) -> int:
    """A long prompt that so many steps belong to already."""
    long = endless(sim, tokens, 1)
    for _ in range(steps):
        sim.step()
    return long


def test_one_that_cannot_be_in_time_lets_those_behind_it_go_first():
    sim = with_target(30.0)
    long = busy(sim, 3 * STEP, 1)
    first = endless(sim, STEP, 1)
    sim.now += 40
    second, third = endless(sim, STEP, 1), endless(sim, STEP, 1)
    assert first_tokens(sim) == [long, second, third, first]


def test_in_time_all_go_in_the_order_of_their_arrival():
    sim = with_target(30.0)
    wanted = [endless(sim, STEP, 1) for _ in range(4)]
    assert first_tokens(sim) == wanted
    sim = simulation(**ROOM)
    long, first = busy(sim, 3 * STEP, 1), endless(sim, STEP, 1)
    sim.now += 1000
    second = endless(sim, STEP, 1)
    assert first_tokens(sim) == [long, first, second]


def test_who_stands_aside_is_counted_among_those_that_wait():
    sim = with_target(30.0)
    busy(sim, 3 * STEP, 1)
    for _ in range(2):
        endless(sim, STEP, 1)
    sim.now += 40
    endless(sim, STEP, 1)
    sim.launch()
    stats = sim.scheduler.stats(sim.now)
    assert (stats.late, stats.waiting) == (2, 3 - (stats.running - 1))
    assert sim.scheduler.has_prompts
    sim.check()
    sim.complete()
    sim.finish()
    assert late(sim) == 0


def test_late_ones_begin_in_steps_that_nobody_else_is_in_line_for():
    sim = with_target(30.0)
    chunks, long = Chunks(sim), endless(sim, STEP + 3, 1)
    assert chunks.next() == {long: STEP}
    slow = endless(sim, 5, 1)
    sim.now += 40
    quick = endless(sim, 5, 1)
    # There is room for the late one beside them, which would go on in front of whoever comes meanwhile.
    assert chunks.next() == {long: 3, quick: 5}
    assert chunks.next() == {slow: 5}


def test_late_ones_of_one_step_begin_together():
    sim = with_target(30.0)
    chunks, long = Chunks(sim), endless(sim, 2 * STEP, 1)
    assert chunks.next() == {long: STEP}
    slow = [endless(sim, 5, 1) for _ in range(4)]
    sim.now += 40
    assert chunks.next() == {long: STEP}
    assert chunks.next() == dict.fromkeys(slow[:3], 5)
    assert chunks.next() == {slow[3]: 5}


def test_after_its_patience_a_late_one_takes_turns_with_those_in_time():
    sim = with_target(30.0)
    long = busy(sim, 2 * STEP, 1)
    slow = [endless(sim, STEP, 1) for _ in range(2)]
    sim.now += 40
    order: list[int] = [long]
    while slow[1] not in order:
        while len(sim.scheduler.live_ids) < 4:
            endless(sim, STEP, 1)
        order += [delta.request_id for delta in sim.step() if delta.tokens and delta.request_id not in order]
    began = order.index(slow[0])
    # Each prompt takes two ticks: nobody who was in time let it go first before that.
    assert 2 * began > PATIENCE * 30 - 50
    # Of those in time one or two go in between, as the next one may have been let in.
    assert order.index(slow[1]) - began in (2, 3)
    sim.finish()


def test_nobody_is_late_twice():
    sim = with_target(30.0)
    busy(sim, 2 * STEP, 1)
    slow = endless(sim, 3 * STEP, 1)
    sim.now += 40
    sim.step()
    assert late(sim) == 1
    sim.step()
    sim.now += 1000
    assert late(sim) == 0
    quick = endless(sim, STEP, 1)
    assert first_tokens(sim)[-2:] == [slow, quick]


def test_a_late_one_can_be_aborted():
    sim = with_target(30.0)
    long = busy(sim, 3 * STEP, 1)
    slow = endless(sim, STEP, 1)
    sim.now += 40
    sim.step()
    assert late(sim) == 1
    sim.abort([slow])
    assert late(sim) == 0
    assert first_tokens(sim) == [long]


def test_what_the_prompt_cache_has_takes_no_time():
    """A conversation that goes on is not late for the length of what it has said."""
    cost = StepCost(step=0.0, token=1000.0, decode_row=0.0, decode_kv=0.0, prefill_pair=0.0)
    for salt, wanted in (("", 0), ("other", 1)):
        sim = simulation(**ROOM)
        known = [2 + i % 60 for i in range(120)]
        sim.add(known, max_tokens=1, ignore_eos=True)
        sim.finish()
        sim.scheduler.bound_steps(None, FirstTokenTarget(60.0, cost))
        busy(sim, 3 * STEP, 1)
        sim.add([*known, 5, 6], max_tokens=1, ignore_eos=True, salt=salt)
        sim.launch()
        assert late(sim) == wanted
        sim.complete()
        sim.finish()


def test_a_late_prompt_and_a_newer_answer_that_wants_its_memory_do_not_wait_for_each_other():
    """Steps of one token: the newer one decodes, with no memory for its next token, and leaves the other no room."""
    room = {"max_batch_tokens": 1, "prefill_chunk_tokens": 1, "max_model_len": 35, "granule_tokens": 3}
    sim = simulation(**room, num_granules=12, num_slots=3)
    sim.scheduler.bound_steps(None, FirstTokenTarget(20.0, replace(A_SECOND_A_STEP, token=200.0)))
    first, late_one, newer = endless(sim, 1, 20), endless(sim, 1, 34), endless(sim, 21, 14)
    sim.finish()
    assert [len(sim.tokens(each)) for each in (first, late_one, newer)] == [20, 34, 14]


@pytest.mark.parametrize("tokens", [100, 1024, 5000])
def test_the_time_to_a_first_token_is_that_of_the_steps_it_takes(tokens):
    """Beside decodes of 6 ms, by steps of 28 ms: counted out step by step."""
    cost = StepCost(step=2.0, token=0.02, decode_row=0.0, decode_kv=0.0, prefill_pair=1e-6)
    room = StepRoom(base=6.0, longest=28.0, tokens=400)
    position, steps = 0, 0
    while position < tokens:
        position += cost.prefill_tokens(room.longest - room.base, position)
        steps += 1
    found = 1e3 * seconds_to_first_token(cost, room, 0, 0, tokens)
    assert (steps - 1) * room.longest < found <= steps * room.longest
    assert seconds_to_first_token(cost, room, 1024, 0, tokens) > found / 1e3 + 0.02
    assert seconds_to_first_token(cost, StepRoom(6.0, inf, 400), 0, 0, tokens) <= found / 1e3


def test_more_of_a_load_has_its_first_token_in_time(simulate_policy):
    """Poisson arrivals near what the device can do: what is late is later, and there is less of it."""
    bound = StepBound(14.0, simulate_policy.COST)
    arrivals = simulate_policy.poisson(31, 1200, random.randrange(1 << 30))
    shares = {}
    for target in (0.0, 95.0):
        engine = simulate_policy.SimulatedEngine(bound, launch_ahead=1.5, target_ttft_ms=target)
        found = engine.run(arrivals, 128)
        shares[target] = sum(ttft <= 100 for ttft in found.ttft) / len(arrivals)
        assert len(found.ttft) == len(arrivals)
    assert 1 - shares[95.0] < 0.7 * (1 - shares[0.0]) + 0.005
