"""Prompts that are cached: who hits what, what is counted, and what gives way when memory is short."""

import pytest

from tests.scheduler import fake_device
from tests.scheduler.fake_device import POISON, VOCAB, fold, limits_of, spec_of
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_planning import endless, simulation
from tests.scheduler.test_preemption import live, until_preempted

PROMPT = [2 + i % 50 for i in range(23)]


def serve(sim: Simulation, prompt: list[int], **how: object) -> int:
    request_id = sim.add(prompt, **{"max_tokens": 3, "ignore_eos": True, **how})
    sim.finish()
    return request_id


def cached(sim: Simulation, request_id: int) -> int:
    return sim.deltas[request_id][0].cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_is_cached_for_the_next_with_the_same_salt(depth):
    sim = simulation(depth)
    found = [cached(sim, serve(sim, PROMPT, salt=salt)) for salt in ("", "", "a", "a", "")]
    assert found == [0, 20, 0, 20, 20]
    stats = sim.scheduler.stats(0.0)
    assert (stats.cached_tokens, stats.prompt_tokens) == (60, 5 * 23)
    assert stats.kv_granules_cached > 0
    sim.scheduler.reset_counters()
    assert sim.scheduler.stats(0.0).cached_tokens == 0


def test_only_what_is_not_cached_is_computed():
    sim = simulation()
    serve(sim, PROMPT)
    sim.add([*PROMPT, 7, 8], max_tokens=1)
    plan = sim.launch()
    assert (plan.starts.tolist(), plan.query_lens.tolist()) == ([20], [5])
    sim.complete()
    sim.finish()


def test_the_answer_is_cached_too():
    sim = simulation()
    first = serve(sim, PROMPT, max_tokens=15)
    conversation = PROMPT + sim.tokens(first)
    assert cached(sim, serve(sim, [*conversation, 9])) == len(conversation) // 4 * 4 == 36


def test_choices_of_one_prompt_share_it_at_once():
    sim = simulation(num_granules=20)
    ids = [sim.add(PROMPT, max_tokens=6, ignore_eos=True) for _ in range(4)]
    sim.launch()
    assert sim.scheduler.stats(0.0).kv_granules_shared == 3 * 5
    assert sim.memory.used == 5 + 4
    sim.complete()
    sim.finish()
    assert [cached(sim, i) for i in ids] == [0, 20, 20, 20]


def test_prompt_logprobs_are_computed_in_full():
    sim = simulation()
    serve(sim, PROMPT)
    request_id = serve(sim, PROMPT, prompt_logprobs=0)
    assert cached(sim, request_id) == 0
    assert len(sim.deltas[request_id][0].prompt_logprobs) == 22


def test_the_cache_is_reset_between_steps_only():
    sim = simulation()
    serve(sim, PROMPT)
    endless(sim, 3, 4)
    sim.launch()
    with pytest.raises(RuntimeError, match="in flight"):
        sim.scheduler.reset_prompt_cache()
    sim.complete()
    sim.scheduler.reset_prompt_cache()
    sim.finish()
    assert cached(sim, serve(sim, PROMPT)) == 0


def failing(beginning: list[int]) -> list[int]:
    """A prompt that goes on from a beginning and whose first logits are not finite, when it has a seed."""
    state = 0
    for token in beginning:
        state = fold(state, token)
    last = next((a, b) for a in range(VOCAB) for b in range(VOCAB) if fold(fold(state, a), b) % VOCAB == POISON)
    return [*beginning, *last]


@pytest.mark.parametrize("sampled", [True, False])
def test_who_fails_takes_along_what_nothing_was_sampled_from(sampled):
    """An aborted prefill may have left what makes others fail."""
    sim = simulation(prefill_chunk_tokens=20)
    first = sim.add(PROMPT, max_tokens=4, ignore_eos=True)
    for _ in range(1 + sampled):
        sim.step()
    sim.abort([first])
    request_id = serve(sim, failing(PROMPT), seed=0)
    assert sim.deltas[request_id][-1].error == "invalid_logits"
    assert cached(sim, request_id) == 20
    assert cached(sim, serve(sim, PROMPT)) == (20 if sampled else 0)


def test_nobody_gives_way_to_a_copy_to_the_host():
    """What it reads is available again once it is done."""
    spec = spec_of(4, 16, 3, 44, host=4)
    sim = Simulation(limits_of(max_model_len=44), spec, depth=5)
    serve(sim, PROMPT[:8], max_tokens=1)
    sim.add([61] * 36, max_tokens=5, ignore_eos=True)
    sim.add([60] * 13, max_tokens=6, ignore_eos=True)
    plans = [sim.launch() for _ in range(5)]
    assert [len(plan.slots) for plan in plans if plan] == [2, 2, 2, 2, 1], "the second has to wait for memory"
    assert (sim.memory.moving, sim.memory.available()) == (2, 0)
    sim.finish()
    assert sim.scheduler.stats(0.0).preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_who_gave_way_hits_what_is_left_of_it(depth):
    sim = simulation(depth, num_granules=12, max_model_len=60)
    for _ in range(3):
        endless(sim, 8, 30)
    until_preempted(sim)
    victim = live(sim, 2)
    known = len(victim.tokens)
    sim.abort([0])
    while victim.slot < 0 or victim.planned < known:
        plan = sim.launch()
        loads = {load.choice: load.slot for load in plan.loads} if plan else {}
        if 2 in loads:
            assert plan.starts[plan.slots == loads[2]][0] >= 8, "at least its prompt is there"
            break
        sim.complete()
    assert cached(sim, 2) == 0, "what its first residence had counts"
    while sim.device.in_flight:
        sim.complete()
    sim.finish()


def test_what_is_mapped_ahead_is_taken_back_before_anyone_gives_way():
    sim = simulation(granule_tokens=8, num_granules=10, max_model_len=80)
    first = endless(sim, 8, 20)
    while not sim.memory.granules.ahead:
        sim.step()
    endless(sim, 55, 4)
    for _ in range(2):
        sim.step()
    assert (sim.memory.granules.ahead, sim.memory.pool.free) == (1, 0)
    sim.step()
    assert (sim.memory.granules.ahead, sim.memory.needed(live(sim, 1).slot)) == (0, 8)
    sim.abort([first])
    sim.finish()
    assert sim.scheduler.stats(0.0).preemptions == 0


def test_cached_prompts_give_way_before_any_request():
    sim = simulation(depth=2, num_granules=30, max_model_len=60)
    for start in range(2, 40, 6):
        serve(sim, [start + i % 7 for i in range(20)])
    assert sim.scheduler.stats(0.0).kv_granules_cached > 20
    for _ in range(3):
        endless(sim, 8, 30)
    sim.finish()
    assert sim.scheduler.stats(0.0).preemptions == 0


def test_what_a_step_too_many_made_no_number_of_is_not_shared(monkeypatch):
    """The step in flight when a request ends writes its last token's KV, and nobody looks at what it samples."""
    stop = 9
    monkeypatch.setattr(fake_device, "sample", lambda state, generated, params: -1 if generated == 1 else stop)
    sim = simulation(depth=2)
    prompt = list(range(20, 31))
    first = sim.add(prompt, stop_token_ids=[stop], ignore_eos=True)
    sim.finish()
    assert sim.tokens(first) == [stop]
    second = sim.add([*prompt, stop, 5, 6], max_tokens=1, ignore_eos=True)
    sim.finish()
    assert sim.tokens(second) == [stop]
    assert sim.device.first_start[second] <= len(prompt)
