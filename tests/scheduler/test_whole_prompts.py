"""Steps of several prompts that are whole, so that nothing is read again for the rest of one."""

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import pytest

from bladellm_runtime.scheduler import planner
from bladellm_runtime.scheduler import prefill_budget as prefill_module
from bladellm_runtime.scheduler.planner import LEAST_PIECE
from bladellm_runtime.scheduler.prefill_budget import STRETCH, WHOLE_SHARE, PrefillDemand, StepBound, prefill_budget
from bladellm_runtime.scheduler.step_cost import StepCost, padded
from tests.scheduler.test_planning import endless, simulation
from tests.scheduler.test_prefill_budget import BOUND, LIMIT, PADDED, SIZES, milliseconds

PROMPT = 512


def waiting(rng: random.Random, lengths: list[int]) -> PrefillDemand:
    """Prompts in line, none of them begun, behind some decodes."""
    rows, ends = rng.randrange(1, 256), tuple(accumulate(lengths))
    return PrefillDemand(rows, rows * rng.randrange(2000), 0, lengths[0], ends[-1] - lengths[0], 0.0, ends)


@pytest.mark.parametrize("bound", [BOUND, PADDED], ids=["alone", "padded"])
def test_a_step_ends_with_a_prompt_or_is_as_full_as_without_knowing_where_they_end(bound):
    rng, whole = random.Random(), 0
    for _ in range(1500):
        demand = waiting(rng, [rng.choice([64, 512, rng.randrange(1, 3000)]) for _ in range(rng.randrange(2, 9))])
        plain = prefill_budget(bound, replace(demand, ends=()), LIMIT)
        tokens = prefill_budget(bound, demand, LIMIT)
        if tokens == plain:
            continue
        whole += 1
        assert tokens in demand.ends
        total = demand.decode_rows + tokens
        filled = padded(total, bound.cost.sizes) <= prefill_module.PADDED * total
        assert filled
        assert WHOLE_SHARE * plain <= tokens
        base = bound.cost.decode_milliseconds(demand.decode_rows, demand.decode_kv)
        allowed = STRETCH * prefill_module._allowed(bound, base, demand)
        assert tokens <= plain or milliseconds(demand, tokens, bound) <= allowed * 1.001
    assert whole > 20


def test_a_prompt_that_fits_into_no_step_is_cut_as_ever():
    """The next step would have to do without a whole one, too."""
    for behind in (2500, 9000):
        demand = PrefillDemand(32, 16_000, 0, 400, 20_000, 0.0, (400, 400 + behind, 20_400))
        assert prefill_budget(PADDED, demand, LIMIT) == prefill_budget(PADDED, replace(demand, ends=()), LIMIT)


@pytest.mark.parametrize(("rows", "prompts"), [(127, 2), (254, 3)])
def test_of_a_long_queue_a_step_takes_as_many_as_go_into_one_with_little_padding(rows, prompts):
    """Beside 127 decodes three are 1,663 tokens, padded to 1,792, and two 1,151."""
    ends = tuple(PROMPT * count for count in range(1, 20))
    demand = PrefillDemand(rows, rows * 576, 0, PROMPT, 19 * PROMPT, 0.0, ends)
    tokens = prefill_budget(PADDED, demand, LIMIT)
    assert tokens == prompts * PROMPT
    assert padded(rows + tokens, SIZES) <= 1.02 * (rows + tokens)


def test_no_prompt_begins_with_a_scrap(monkeypatch):
    """What a step has left beside others is padding then."""
    limits = {"max_batch_tokens": 600, "prefill_chunk_tokens": 600, "max_model_len": 4096, "num_granules": 2000}
    monkeypatch.setattr(planner, "prefill_budget", lambda bound, demand, limit: limit)
    for left, scrap in ((LEAST_PIECE - 1, True), (LEAST_PIECE, False), (40, True)):
        for bound in (None, StepBound(14.0, StepCost(2.0, 0.02, 0.0, 0.0, 0.0))):
            sim = simulation(**limits)
            sim.scheduler.bound_steps(bound)
            endless(sim, 600 - left, 4)
            endless(sim, 300, 4)
            lens = sim.launch().query_lens.tolist()
            assert lens == ([600 - left] if scrap and bound else [600 - left, left])
            sim.finish()


def test_what_a_long_prompt_begins_with_fills_the_step(monkeypatch):
    """It is cut in any case."""
    monkeypatch.setattr(planner, "prefill_budget", lambda bound, demand, limit: limit)
    sim = simulation(max_batch_tokens=600, prefill_chunk_tokens=600, max_model_len=4096, num_granules=2000)
    sim.scheduler.bound_steps(StepBound(14.0, StepCost(2.0, 0.02, 0.0, 0.0, 0.0)))
    for length in (570, 601):
        endless(sim, length, 4)
    assert sim.launch().query_lens.tolist() == [570, 30]
    sim.finish()


def test_a_prompt_shorter_than_a_scrap_goes_in_whole():
    sim = simulation(max_batch_tokens=600, prefill_chunk_tokens=600, max_model_len=4096, num_granules=2000)
    sim.scheduler.bound_steps(StepBound(1000.0, StepCost(0.1, 0.1, 0.0, 0.0, 0.0)))
    for length in (580, 20, 30):
        endless(sim, length, 4)
    assert sim.launch().query_lens.tolist() == [580, 20]
    sim.finish()


def test_one_in_front_that_was_overtaken_begins_however_little_is_left(monkeypatch):
    """It has waited for those: the rest of the step is its own."""
    limits = {"max_batch_tokens": 100, "prefill_chunk_tokens": 100, "max_model_len": 4096, "num_granules": 2000}
    sim = simulation(**limits)
    sim.scheduler.bound_steps(StepBound(1000.0, StepCost(0.1, 0.1, 0.0, 0.0, 0.0)))
    first, front, short = endless(sim, 60, 4), endless(sim, 900, 4), endless(sim, 50, 4)
    monkeypatch.setattr(sim.scheduler._planner, "_is_scrap", lambda seq, budget: budget < LEAST_PIECE)
    started = []
    while not sim.tokens(short):
        started.append({load.choice for load in sim.launch().loads})
        sim.complete()
    assert started[:2] == [{first}, {front, short}]
    sim.finish()


def cut_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill steps with pieces, whatever there is in line."""
    monkeypatch.setattr(prefill_module, "WHOLE_SHARE", 2.0)


def closed_loop(tool, streams: int) -> list[tuple[int, int]]:
    """Start and tokens of all chunks of a simulated closed loop, after its first half."""
    engine = tool.SimulatedEngine(PADDED, launch_ahead=1.5, cost=PADDED.cost)
    chunks, plan = [], engine._scheduler.plan

    def planned():
        made = plan()
        if made is not None:
            prompts = slice(made.num_decode, None)
            chunks.extend(zip(made.starts[prompts].tolist(), made.query_lens[prompts].tolist(), strict=True))
        return made

    engine._scheduler.plan = planned
    engine.run_streams(streams, PROMPT, 128, 5 * streams)
    return chunks[len(chunks) // 2 :]


@pytest.mark.parametrize("streams", [128, 256])
def test_equal_prompts_of_a_closed_loop_are_whole_in_most_steps(streams, simulate_policy, monkeypatch):
    """A third of the chunks, in four of five steps, were pieces before, some of a single token."""
    found = closed_loop(simulate_policy, streams)
    assert np.mean([chunk == (0, PROMPT) for chunk in found]) > 0.8
    cut_prompts(monkeypatch)
    cut = closed_loop(simulate_policy, streams)
    assert np.mean([chunk == (0, PROMPT) for chunk in cut]) < 0.75


def test_ends_are_those_of_the_line_as_far_as_a_step_goes(monkeypatch):
    demands = []
    budget = planner.prefill_budget
    monkeypatch.setattr(planner, "prefill_budget", lambda *asked: demands.append(asked[1]) or budget(*asked))
    sim = simulation(max_batch_tokens=512, prefill_chunk_tokens=512, max_model_len=4096, num_granules=2000)
    sim.scheduler.bound_steps(StepBound(14.0, replace(BOUND.cost, token=0.1)))
    lengths = [random.randrange(50, 400) for _ in range(30)]
    for length in lengths:
        endless(sim, length, 1)
    for _ in range(5):
        sim.step()
    assert demands[0].ends == tuple(accumulate(lengths))[: len(demands[0].ends)]
    for demand in demands:
        assert demand.ends[0] == demand.tokens
        assert all(first < second for first, second in pairwise(demand.ends))
        assert demand.ends[-1] >= 512 or demand.ends[-1] == demand.tokens + demand.queued
    sim.finish()
