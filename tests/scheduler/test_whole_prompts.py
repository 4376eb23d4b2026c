"""Steps of several prompts that are whole, so that nothing is read again for the rest of one."""

import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

from bladellm_runtime.scheduler import planner
from bladellm_runtime.scheduler import prefill_budget as prefill_module
from bladellm_runtime.scheduler.prefill_budget import (
    LEAST_PIECE,
    MOST_PADDING,
    STRETCH,
    WHOLE_SHARE,
    PrefillDemand,
    prefill_budget,
)
from bladellm_runtime.scheduler.step_cost import StepLoad, padded
from tests.scheduler.test_planning import endless, simulation
from tests.scheduler.test_prefill_budget import BOUND, LIMIT, PADDED, SIZES, milliseconds

PROMPT = 512


def waiting(rng: random.Random, lengths: list[int]) -> PrefillDemand:
    """Prompts in line, none of them begun, behind some decodes."""
    rows, (first, *behind) = rng.randrange(1, 256), lengths
    return PrefillDemand(rows, rows * rng.randrange(2000), 0, first, sum(behind), 0.0, tuple(behind))


@pytest.mark.parametrize("bound", [BOUND, PADDED], ids=["alone", "padded"])
def test_a_step_ends_with_a_prompt_or_is_as_full_as_without_knowing_where_they_end(bound):
    rng, whole = random.Random(), 0
    for _ in range(1500):
        lengths = [rng.choice([64, 512, rng.randrange(1, 3000)]) for _ in range(rng.randrange(2, 9))]
        demand = waiting(rng, lengths)
        plain = prefill_budget(bound, replace(demand, behind=()), LIMIT)
        tokens = prefill_budget(bound, demand, LIMIT)
        if tokens == plain:
            continue
        assert tokens in accumulate(lengths)
        if plain - LEAST_PIECE < tokens < plain:
            continue
        whole += 1
        total = demand.decode_rows + tokens
        assert padded(total, bound.cost.sizes) <= MOST_PADDING * total
        assert WHOLE_SHARE * plain <= tokens
        base = bound.cost.decode_milliseconds(demand.decode_rows, demand.decode_kv)
        allowed = STRETCH * prefill_module._allowed(bound, base, demand)
        assert tokens <= plain or milliseconds(demand, tokens, bound) <= allowed * 1.001
    assert whole > 20


def test_a_prompt_that_fits_into_no_step_is_cut_as_ever():
    """The next step would have to do without a whole one, too."""
    for behind in (2500, 9000):
        demand = PrefillDemand(32, 16_000, 0, 400, 20_000, 0.0, (behind, 20_000 - behind))
        assert prefill_budget(PADDED, demand, LIMIT) == prefill_budget(PADDED, replace(demand, behind=()), LIMIT)


@pytest.mark.parametrize(("rows", "prompts"), [(127, 2), (254, 3)])
def test_of_a_long_queue_a_step_takes_as_many_as_go_into_one_with_little_padding(rows, prompts):
    """Beside 127 decodes three are 1,663 tokens, padded to 1,792, and two 1,151."""
    demand = PrefillDemand(rows, rows * 576, 0, PROMPT, 19 * PROMPT, 0.0, (PROMPT,) * 19)
    tokens = prefill_budget(PADDED, demand, LIMIT)
    assert tokens == prompts * PROMPT
    assert padded(rows + tokens, SIZES) <= 1.02 * (rows + tokens)


def test_the_last_of_a_queue_goes_in_whole_though_the_step_is_a_little_longer():
    rows, tokens = 127, 2 * PROMPT
    bound = replace(PADDED, milliseconds=PADDED.cost.milliseconds(StepLoad(rows, 0, tokens - 64, 0)))
    demand = PrefillDemand(rows, 0, 0, PROMPT, PROMPT, 0.0, (PROMPT,))
    assert prefill_budget(bound, demand, LIMIT) == tokens > prefill_budget(bound, replace(demand, behind=()), LIMIT)


@pytest.mark.parametrize(
    ("behind", "taken"), [((PROMPT,), 0), ((641,), 40), ((40,), 40), ((30, PROMPT), 30), ((30, 641), 40)], ids=str
)
def test_a_prompt_that_could_be_whole_does_not_begin_with_a_scrap(behind, taken):
    """What a step has left behind the last prompt is padding then. One that is cut in any case fills it, and one that
    ends there."""
    demand = PrefillDemand(0, 0, 0, 600, sum(behind), 0.0, behind)
    assert prefill_budget(PADDED, replace(demand, behind=()), LIMIT) == 640
    assert prefill_budget(PADDED, demand, LIMIT) == 600 + taken


def test_the_row_that_decodes_and_a_prompt_leave_of_a_step_begins_none():
    """127 and 512 of 640: the prompt behind had something before it then, by a single token."""
    bound = replace(PADDED, milliseconds=13.0)
    demand = PrefillDemand(127, 127 * 576, 0, PROMPT, 700, 0.6, (700,))
    assert prefill_budget(bound, replace(demand, behind=()), LIMIT) == PROMPT + 1
    assert prefill_budget(bound, demand, LIMIT) == PROMPT + 1, "that is cut in any case"
    assert prefill_budget(bound, replace(demand, queued=PROMPT, behind=(PROMPT,)), LIMIT) == PROMPT


def test_a_piece_that_is_no_scrap_fills_the_step():
    for left in (LEAST_PIECE - 1, LEAST_PIECE):
        demand = PrefillDemand(0, 0, 0, 640 - left, PROMPT, 0.0, (PROMPT,))
        assert prefill_budget(PADDED, demand, LIMIT) == (640 if left == LEAST_PIECE else 640 - left)


def whole_share(tool, streams: int) -> float:
    """Of all chunks of a simulated closed loop, after its first half, those that are whole prompts."""
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
    return np.mean([chunk == (0, PROMPT) for chunk in chunks[len(chunks) // 2 :]])


@pytest.mark.parametrize("streams", [128, 256])
def test_equal_prompts_of_a_closed_loop_are_whole_in_most_steps(streams, simulate_policy, monkeypatch):
    """A third of the chunks, in four of five steps, were pieces before, some of a single token."""
    assert whole_share(simulate_policy, streams) > 0.8
    monkeypatch.setattr(prefill_module, "KEPT_SHARE", 0.0)
    assert whole_share(simulate_policy, streams) > 0.8
    monkeypatch.setattr(prefill_module, "WHOLE_SHARE", 2.0)
    assert whole_share(simulate_policy, streams) < 0.75


def test_what_is_behind_is_the_line_as_far_as_a_step_goes(monkeypatch):
    demands, budget = [], planner.prefill_budget
    monkeypatch.setattr(planner, "prefill_budget", lambda *asked: demands.append(asked[1]) or budget(*asked))
    sim = simulation(max_batch_tokens=512, prefill_chunk_tokens=512, max_model_len=4096, num_granules=2000)
    sim.scheduler.bound_steps(replace(BOUND, cost=replace(BOUND.cost, token=0.1)))
    lengths = [random.randrange(50, 400) for _ in range(30)]
    for length in lengths:
        endless(sim, length, 1)
    for _ in range(5):
        sim.step()
    assert (demands[0].tokens, *demands[0].behind) == tuple(lengths[: 1 + len(demands[0].behind)])
    for demand in demands:
        assert sum(demand.behind[:-1]) < 512
        assert sum(demand.behind) >= 512 or sum(demand.behind) == demand.queued
    sim.finish()
