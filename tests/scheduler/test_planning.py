"""What goes into a step: order, budget, chunks, lengths."""

import random
from itertools import pairwise

import pytest

from bladellm_runtime.request import FinishReason
from tests.scheduler.fake_device import answer_limit, limits_of, spec_of
from tests.scheduler.simulator import Simulation


def simulation(depth=1, *, granule_tokens=4, num_granules=100, num_slots=8, **limits) -> Simulation:
    limits = limits_of(**limits)
    return Simulation(limits, spec_of(granule_tokens, num_granules, num_slots, limits.max_model_len), depth)


def endless(sim: Simulation, length: int, max_tokens: int | None = None) -> int:
    """A request that shares no prompt with those before it."""
    return sim.add([2 + len(sim.requests) % 60] * length, max_tokens=max_tokens, ignore_eos=True)


def rows(plan) -> list[tuple[int, int, bool]]:
    return list(zip(plan.starts.tolist(), plan.query_lens.tolist(), plan.samples.tolist(), strict=True))


def test_decode_rows_come_first_then_chunks_in_arrival_order():
    sim = simulation(max_batch_tokens=12, prefill_chunk_tokens=6)
    for length in (3, 9, 5):
        endless(sim, length, 8)
    assert rows(sim.launch()) == [(0, 3, True), (0, 6, False), (0, 3, False)]
    sim.complete()
    plan = sim.launch()
    assert plan.num_decode == 1
    assert rows(plan) == [(3, 1, True), (6, 3, True), (3, 2, True)]
    sim.complete()
    assert sim.launch().starts.tolist() == [4, 9, 5]
    sim.complete()
    sim.finish()


def test_a_load_comes_with_its_first_rows():
    sim = simulation(max_batch_tokens=4)
    endless(sim, 6)
    endless(sim, 6)
    first, second = sim.launch(), sim.launch()
    assert [load.choice for load in first.loads] == [0]
    assert second is None, "one step at a time"
    sim.complete()
    assert [load.choice for load in sim.launch().loads] == [1]
    sim.complete()
    sim.finish()


def test_decoding_sequences_never_outnumber_the_budget():
    sim = simulation(depth=2, max_batch_tokens=3, num_slots=8)
    for _ in range(8):
        endless(sim, 2, 10)
    most = 0
    while not sim.scheduler.idle:
        plan = sim.launch()
        sim.complete()
        most = max(most, plan.num_decode if plan else 0)
    assert most == 3
    sim.check_all()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_no_step_is_wasted_on_a_request_that_reaches_its_length(depth, max_tokens):
    sim = simulation(depth)
    endless(sim, 5, max_tokens)
    sim.finish()
    assert sim.scheduler.stats(0.0).steps == max_tokens


def test_an_overlapped_step_costs_one_token_after_a_stop():
    steps = []
    for depth in (1, 2):
        sim = simulation(depth)
        sim.add([5, 6], max_tokens=40, stop_token_ids=range(0, 62, 2), ignore_eos=True)
        sim.finish()
        assert sim.deltas[0][-1].finish is FinishReason.STOP
        steps.append(sim.scheduler.stats(0.0).steps)
    assert steps[1] == steps[0] + 1


@pytest.mark.parametrize("granules", [3, 5, 100])
@pytest.mark.parametrize("asked", [None, 1, 1000])
def test_max_tokens_is_clamped_to_the_model_length_and_the_arena(granules, asked):
    sim = simulation(num_granules=granules, max_model_len=30)
    request_id = endless(sim, 10, asked)
    expected = answer_limit(sim.requests[request_id], sim.limits, sim.spec)
    assert expected == (asked if asked == 1 else {3: 3, 5: 11, 100: 20}[granules])
    sim.finish()
    assert len(sim.tokens(request_id)) == expected


def test_requests_wait_for_a_slot_in_arrival_order():
    sim = simulation(depth=2, num_slots=2)
    for _ in range(6):
        endless(sim, 3, 4)
    sim.launch()
    assert (sim.scheduler.stats(0.0).running, sim.scheduler.stats(0.0).waiting) == (2, 4)
    sim.finish()
    assert sim.loaded == [0, 1, 2, 3, 4, 5]


def test_a_large_request_is_not_overtaken_while_small_ones_keep_coming():
    sim = simulation(depth=2, num_granules=10, max_model_len=40)
    for _ in range(3):
        endless(sim, 6, 10)
    large = endless(sim, 36, 3)
    for _ in range(200):
        endless(sim, 2, 4)
        sim.step()
        sim.check()
        if large not in sim.live:
            break
    assert sim.tokens(large)
    sim.abort(sim.live)
    sim.finish()


def test_an_empty_scheduler_plans_nothing():
    sim = simulation()
    assert sim.scheduler.plan() is None
    assert sim.scheduler.idle
    assert not sim.scheduler.has_work


def test_stats_count_what_happened():
    sim = simulation(num_slots=3)
    endless(sim, 5, 4)
    endless(sim, 7, 2)
    sim.finish()
    stats = sim.scheduler.stats(99.0)
    assert (stats.time, stats.running, stats.waiting, stats.slots) == (99.0, 0, 0, 3)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps, stats.preemptions) == (12, 6, 4, 0)
    assert (stats.kv_granules, stats.kv_granules_used, stats.granule_tokens) == (100, 0, 4)
    assert stats.step_seconds == 4.0


@pytest.mark.parametrize(("depth", "granule"), [(1, 8), (2, 8), (2, 48)])
def test_decode_rows_find_their_memory_mapped_by_earlier_plans(depth, granule):
    """Whatever prompts and answers come, as long as there is memory, be it full of cached prompts."""
    rng = random.Random()
    sim = simulation(depth, granule_tokens=granule, num_granules=100, max_model_len=10 * granule)
    grown = 0
    for _ in range(60):
        prompt = [rng.randrange(2, 60) for _ in range(rng.randint(1, 5 * granule))]
        sim.add(prompt, max_tokens=rng.randint(1, 5 * granule), ignore_eos=True)
        for _ in range(rng.randint(0, 20 * granule // 8)):
            plan = sim.launch()
            if plan is not None:
                decoding = set(plan.slots[: plan.num_decode])
                grown += sum(view.slot in decoding for view in plan.memory.ahead)
                assert not decoding & {view.slot for view in plan.memory.views}
            if plan is None or len(sim.device.in_flight) == depth:
                sim.complete()
    assert grown > 20
    assert sim.memory.pool.free < 20
    sim.finish()


def test_sequences_that_need_memory_at_different_steps_ask_for_it_together():
    """Eight of them, in granules of 64: every fourth step at most has anything to do with memory."""
    sim = simulation(2, granule_tokens=64, max_batch_tokens=400, prefill_chunk_tokens=400, max_model_len=500)
    for index in range(8):
        endless(sim, 17 + 8 * index, 400)
    busy, used = [], []
    while sim.live:
        plan = sim.launch()
        if plan is not None and plan.num_decode == 8:
            busy.append(bool(plan.memory))
            used.append(sim.memory.used)
        if plan is None or len(sim.device.in_flight) == 2:
            sim.complete()
    changes = [before != after for before, after in pairwise(used)]
    assert len(busy) > 300
    assert 20 < sum(busy) <= len(busy) / 4 + 1
    assert 20 < sum(changes) <= len(changes) / 4 + 1


@pytest.mark.parametrize("background", [True, False])
def test_tight_memory_of_long_granules(background):
    """Sequences give way while others have been given memory before they need it, which may be late."""
    rng = random.Random()
    limits = limits_of(max_model_len=480)
    sim = Simulation(limits, spec_of(48, 24, 8, 480), 2, background=background, seed=rng.randrange(999))
    for _ in range(8):
        endless(sim, rng.randint(1, 90), rng.randint(300, 390))  # three fill the memory
    for _ in range(12):
        prompt = [rng.randrange(2, 60) for _ in range(rng.randint(1, 200))]
        sim.add(prompt, max_tokens=rng.randint(1, 250), ignore_eos=True)
        for _ in range(rng.randint(0, 100)):
            sim.step()
        if rng.random() < 0.2 and sim.live[8:]:
            sim.abort([rng.choice(sim.live[8:])])
    sim.finish()
    assert sim.scheduler.stats(0.0).preemptions > 0
    assert (sim.memory.used, sim.memory.granules.ahead) == (0, 0)


def test_nothing_is_mapped_ahead_for_who_ends_before():
    """A request of 16 tokens that are written, in granules of 8."""
    sim = simulation(granule_tokens=8)
    endless(sim, 7, 10)
    ahead = []
    while sim.live:
        plan = sim.launch()
        ahead += [view.position for view in plan.memory.ahead if view.slot in plan.slots] if plan else []
        sim.complete()
    assert ahead == [1]
    assert sim.memory.granules.ahead == 0
