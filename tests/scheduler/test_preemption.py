"""A full KV cache: who gives way, what is recomputed, and that it ends well."""

import pytest

from bladellm_runtime.scheduler import policy
from bladellm_runtime.scheduler.policy import headroom
from bladellm_runtime.scheduler.sequence import State
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_planning import endless, simulation


def crowd(depth: int, lengths: list[int], *, granules: int, max_tokens: int = 30) -> Simulation:
    sim = simulation(depth, num_granules=granules, max_model_len=60)
    for length in lengths:
        endless(sim, length, max_tokens)
    return sim


def until_preempted(sim: Simulation) -> None:
    while not sim.scheduler.stats(0.0).preemptions:
        assert sim.live, "the memory was meant to be too small"
        sim.step()
        sim.check()


def live(sim: Simulation, request_id: int):
    return sim.scheduler._roster.live[request_id]


@pytest.mark.parametrize("depth", [1, 2])
def test_the_newest_gives_way_and_is_resumed_with_what_it_had(depth):
    sim = crowd(depth, [8, 8, 8], granules=12)
    until_preempted(sim)
    assert [live(sim, i).state for i in range(3)] == [State.DECODE, State.DECODE, State.WAITING]
    sim.finish()
    assert sim.loaded[3:].count(0) == 0
    resumed = max(sim.device.residences.values(), key=lambda residence: residence.number).load
    assert resumed.choice == 2
    assert resumed.prompt_len == 8
    assert len(resumed.ids()) > 8
    assert [len(sim.tokens(i)) for i in range(3)] == [30, 30, 30]


def test_overlapped_preemption_takes_no_more_than_it_needs():
    sim = crowd(2, [8, 8, 8], granules=12)
    until_preempted(sim)
    sim.launch()
    # The first victim's granules come back with the step in flight: they are waited for.
    assert sim.scheduler.stats(0.0).preemptions == 1
    sim.finish()


def test_a_victim_keeps_its_slot_and_its_tokens_until_its_last_step_is_in():
    sim = crowd(2, [8, 8], granules=8)
    while not sim.scheduler.stats(0.0).preemptions:
        sim.complete()
        sim.launch()
        sim.launch()
    victim = live(sim, 1)
    known, used = victim.generated, sim.memory.used
    in_flight = [plan for plan, _ in sim.device.in_flight if victim.slot in plan.slots]
    assert in_flight
    sim.complete()
    assert victim.generated == known + 1
    while sim.device.in_flight:
        sim.complete()
    assert sim.memory.used < used
    assert victim.state is State.WAITING
    sim.finish()


def test_a_victim_is_not_admitted_again_before_its_last_step_is_in():
    sim = crowd(1, [8, 8], granules=100)
    sim.launch()
    roster = sim.scheduler._roster
    roster.preempt(live(sim, 1))
    assert roster.admit(0.0) is None, "there is room, but its last token is in flight"
    sim.complete()
    assert sim.launch().loads[0].ids().tolist() == sim.requests[1].prompt + sim.tokens(1)
    sim.complete()
    sim.finish()


def test_each_row_short_of_memory_counts_on_granules_of_its_own(monkeypatch):
    monkeypatch.setattr(policy, "headroom", lambda seq, running: 0)
    sim = crowd(2, [8, 8], granules=8)
    while sim.memory.available() > 2 or live(sim, 0).planned < 11:
        sim.step()
    endless(sim, 1, 3)
    endless(sim, 1, 3)
    sim.step()
    assert sim.memory.available() == 0
    sim.launch()
    # Both old rows need a granule, and each of the new ones in flight brings only one back.
    assert sim.scheduler.stats(0.0).preemptions == 2
    sim.finish()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_victim_can_be_aborted_while_it_waits(depth):
    sim = crowd(depth, [8, 8, 8], granules=12)
    until_preempted(sim)
    assert len(sim.abort([2])) == 1
    sim.finish()
    assert [len(sim.tokens(i)) for i in range(2)] == [30, 30]


@pytest.mark.parametrize("depth", [1, 2])
def test_logprobs_are_neither_lost_nor_repeated(depth):
    sim = simulation(depth, num_granules=8, max_model_len=60, prefill_chunk_tokens=3)
    for _ in range(3):
        sim.add([9] * 9, max_tokens=20, ignore_eos=True, logprobs=0, prompt_logprobs=1)
    sim.finish()
    assert sim.scheduler.stats(0.0).preemptions > 0
    assert [len(sim.deltas[i][0].prompt_logprobs) for i in range(3)] == [8, 8, 8]


def test_a_request_preempted_in_its_prefill_keeps_its_time_of_scheduling_and_scores():
    sim = simulation(num_granules=8, max_model_len=32, max_batch_tokens=3)
    endless(sim, 3, 28)
    sim.add([9] * 20, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    until_preempted(sim)
    first = live(sim, 1).scheduled_at
    assert live(sim, 1).generated == 0
    assert live(sim, 1).prompt_logprobs
    sim.finish()
    assert sim.deltas[1][0].scheduled_at == first
    assert len(sim.deltas[1][0].prompt_logprobs) == 19


def test_headroom_grows_with_each_preemption_and_is_nothing_when_alone():
    sim = crowd(1, [8, 8, 8], granules=100)
    sim.launch()
    newcomer, *running = (live(sim, i) for i in range(3))
    amounts = []
    for newcomer.preemptions in range(4):
        amounts.append(headroom(newcomer, running))
    assert amounts == [2, 4, 8, 16]
    assert headroom(newcomer, []) == 0
    running[0].kv_end = running[0].reserved
    assert headroom(newcomer, running) == 8


@pytest.mark.parametrize("depth", [1, 2])
def test_two_requests_that_each_need_the_whole_arena_both_finish(depth):
    sim = crowd(depth, [4, 4], granules=10, max_tokens=37)
    sim.finish()
    assert [len(sim.tokens(i)) for i in range(2)] == [37, 37]
    assert sim.scheduler.stats(0.0).preemptions <= 2, "the two must not take turns"
