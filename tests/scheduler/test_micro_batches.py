"""Micro-batches: groups of running sequences that take turns, of equal size, none of which waits for ever."""

import random

import pytest

from bladellm_runtime.scheduler.micro_batches import has_room
from tests.scheduler.fake_device import VOCAB, limits_of, spec_of
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_properties import run_workload, streams


def simulation(groups: int, depth: int = 2, slots: int = 24, **limits: int) -> Simulation:
    return Simulation(limits_of(max_model_len=60, **limits), spec_of(4, 1000, slots, 60), depth, groups=groups)


def crowd(sim: Simulation, count: int, length: int = 5, answer: int = 40) -> None:
    for _ in range(count):
        sim.add([random.randrange(2, VOCAB - 1) for _ in range(length)], max_tokens=answer, ignore_eos=True)


def sizes(sim: Simulation) -> list[int]:
    found = [0] * sim.groups
    for seq in sim.scheduler._roster.running():
        found[seq.group] += 1
    return found


@pytest.mark.parametrize("groups", [2, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_consecutive_steps_serve_different_groups_of_one_size(groups, depth):
    sim = simulation(groups, depth)
    crowd(sim, 13)
    plans = []
    for _ in range(6 * groups):
        plan = sim.launch()
        if plan is not None:
            plans.append(set(plan.slots))
        if len(sim.device.in_flight) == sim.depth:
            sim.complete()
    assert max(sizes(sim)) - min(sizes(sim)) <= 1
    assert sum(sizes(sim)) == 13
    for first in range(groups, len(plans) - groups):
        window = plans[first : first + groups]
        assert len(set().union(*window)) == sum(map(len, window)) == 13
        assert plans[first + groups] == plans[first]
    sim.finish()


def test_a_sequence_alone_is_in_no_more_steps_than_with_one_group():
    for depth in (1, 2):
        sim = simulation(4, depth)
        crowd(sim, 1)
        launched = [sim.launch() for _ in range(6)]
        assert [plan is not None for plan in launched] == [True] * depth + [False] * (6 - depth)
        sim.finish()


def test_groups_fill_up_again_where_others_have_ended():
    sim = simulation(2)
    crowd(sim, 10)
    for _ in range(4):
        sim.step()
    ended = [seq.request_id for seq in sim.scheduler._roster.running() if seq.group == 0][:4]
    sim.abort(ended)
    crowd(sim, 5)
    for _ in range(6):
        sim.step()
    found = sizes(sim)
    assert sum(found) == 11
    assert abs(found[0] - found[1]) <= 1
    sim.finish()


@pytest.mark.parametrize("groups", [2, 3])
def test_a_prompt_goes_on_while_others_decode(groups):
    """A chunk in every step of its group, whatever the others do; and no decode waits for it."""
    sim = simulation(groups, max_batch_tokens=16, prefill_chunk_tokens=4)
    crowd(sim, 4 * groups, length=3)
    for _ in range(8 * groups):
        sim.step()
    sim.add([2] * 40, max_tokens=2, ignore_eos=True)
    steps = 0
    while not sim.tokens(4 * groups):
        sim.step()
        steps += 1
    assert steps <= (10 + 2) * groups + sim.depth
    sim.finish()


@pytest.mark.turns
@pytest.mark.parametrize("seed", range(4))
def test_groups_do_not_change_a_stream(seed):
    plain, _ = run_workload(seed, depth=1, granules=1000, budget=1000, chunk=1000)
    total = 0
    for groups in (2, 3, 7):
        for depth, budget, chunk in ((1, 1000, 1000), (2, 7, 1000), (2, 1000, 2), (2, 1, 1)):
            crowded, preemptions = run_workload(seed, depth, granules=20, budget=budget, chunk=chunk, groups=groups)
            assert streams(crowded) == streams(plain)
            total += preemptions
    assert total > 0, "the memory was meant to be too small"


def test_some_group_has_room_as_long_as_something_waits_and_a_slot_is_free():
    for _ in range(2000):
        found = [random.randint(0, 9) for _ in range(random.randint(1, 6))]
        slots, waiting = sum(found) + random.randint(1, 9), random.randint(1, 9)
        spread = max(found) - min(found)
        for left in range(min(waiting, slots - sum(found)), 0, -1):
            rooms = [group for group in range(len(found)) if has_room(group, found, left, slots)]
            assert rooms
            found[random.choice(rooms)] += 1
        assert max(found) - min(found) <= max(spread, 1)
