"""How many prompt tokens a step takes, in numbers and in a simulation of the scheduler with measured step times."""

import random
from dataclasses import replace

import pytest

from bladellm_runtime.scheduler import planner
from bladellm_runtime.scheduler import prefill_budget as prefill_module
from bladellm_runtime.scheduler.prefill_budget import (
    BUSY_BOUNDS,
    KEPT_SHARE,
    MIN_TOKENS,
    QUEUE_STEPS,
    STEP_MULTIPLE,
    STRETCH,
    STRETCHED_STEPS,
    PrefillDemand,
    StepBound,
    prefill_budget,
)
from bladellm_runtime.scheduler.prompt_load import AVERAGE_SECONDS, PromptLoad
from bladellm_runtime.scheduler.sequence import Sequence
from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad, chunk_pairs, padded
from tests.scheduler.fake_device import limits_of, spec_of
from tests.scheduler.simulator import Simulation
from tests.scheduler.test_planning import endless, simulation
from tests.scheduler.test_soak import Traffic

COST = StepCost(step=2.0, token=0.0183, decode_row=0.0, decode_kv=3e-5, prefill_pair=0.7e-6)
BOUND = StepBound(14.0, COST)
SIZES = (32, *range(64, 1025, 64), 1152, 1280, 1536, 1792, 2048)
PADDED = StepBound(14.0, replace(COST, sizes=SIZES))
LIMIT = 8192


def milliseconds(demand: PrefillDemand, tokens: int, bound: StepBound = BOUND) -> float:
    return bound.cost.milliseconds(
        StepLoad(demand.decode_rows, demand.decode_kv, tokens, chunk_pairs(demand.start, tokens))
    )


def some_demand(rng: random.Random) -> PrefillDemand:
    rows = rng.randrange(1, 256)
    return PrefillDemand(rows, rows * rng.randrange(2000), rng.randrange(5000), rng.randrange(1, 9000), 0)


@pytest.mark.parametrize("bound", [BOUND, PADDED], ids=["alone", "padded"])
def test_a_step_with_decodes_keeps_the_bound_unless_it_has_the_least_tokens(bound):
    rng = random.Random()
    for _ in range(300):
        demand = some_demand(rng)
        tokens = prefill_budget(bound, demand, LIMIT)
        least = padded(demand.decode_rows + MIN_TOKENS, bound.cost.sizes) - demand.decode_rows
        most = bound.milliseconds * (STRETCH if tokens * STRETCHED_STEPS > demand.tokens else 1)
        assert tokens <= least or milliseconds(demand, tokens, bound) <= most * 1.001
        assert tokens >= min(MIN_TOKENS, demand.tokens) - STEP_MULTIPLE


@pytest.mark.parametrize(("bound", "apart"), [(BOUND, STEP_MULTIPLE), (PADDED, 256)], ids=["alone", "padded"])
def test_chunks_of_a_lonely_prompt_are_equal_and_no_more_than_the_bound_makes_them(bound, apart, monkeypatch):
    """Where no step is stretched: a longer step may save one of those that were cut equal."""
    monkeypatch.setattr(prefill_module, "STRETCHED_STEPS", 0)
    rng = random.Random()
    for _ in range(300):
        demand = replace(some_demand(rng), start=0)
        longest = max(prefill_budget(bound, replace(demand, tokens=10**6), LIMIT), 1)
        left, chunks = demand.tokens, []
        while left:
            part = min(left, prefill_budget(bound, replace(demand, tokens=left), LIMIT))
            chunks.append(part)
            left -= part
        assert len(chunks) <= -(-demand.tokens // max(longest - apart, 1))
        assert max(chunks) - min(chunks) <= len(chunks) * apart


def chunks_of(demand: PrefillDemand, bound: StepBound) -> list[int]:
    """How a prompt that nobody waits behind is cut."""
    chunks: list[int] = []
    while (left := demand.tokens - sum(chunks)) > 0:
        now = replace(demand, tokens=left, start=demand.start + sum(chunks))
        chunks.append(min(left, prefill_budget(bound, now, LIMIT)))
    return chunks


@pytest.mark.parametrize("sizes", [(), SIZES], ids=["alone", "padded"])
def test_a_step_a_little_longer_saves_a_short_prompt_a_step_and_never_more_than_that_much(sizes, monkeypatch):
    """Beside the rule without it, over devices fast and slow: no prompt takes more steps, some short ones one less, and
    steps beyond the bound are those of short prompts alone."""
    rng, saved = random.Random(), 0
    for _ in range(400):
        bound = StepBound(14.0, replace(COST, token=rng.uniform(0.012, 0.03), sizes=sizes))
        demand = replace(some_demand(rng), decode_rows=rng.randrange(1, 40), decode_kv=9000, start=0)
        stretched = chunks_of(demand, bound)
        with monkeypatch.context() as patch:
            patch.setattr(prefill_module, "STRETCHED_STEPS", 0)
            strict = chunks_of(demand, bound)
        assert len(stretched) <= len(strict)
        saved += len(stretched) < len(strict)
        if len(strict) > STRETCHED_STEPS + 1:
            assert stretched[0] == strict[0]
        start = 0
        for chunk in stretched:
            took = milliseconds(replace(demand, start=start), chunk, bound)
            assert took <= STRETCH * bound.milliseconds * 1.001 or chunk <= 2 * MIN_TOKENS
            start += chunk
    assert saved > 5


def test_prompts_that_do_not_end_fill_the_size_that_their_step_is_padded_to():
    rng = random.Random()
    filled = 0
    for _ in range(300):
        demand = replace(some_demand(rng), queued=rng.choice([0, rng.randrange(500)]))
        total = demand.decode_rows + prefill_budget(PADDED, demand, LIMIT)
        if total - demand.decode_rows < demand.tokens + demand.queued and total <= SIZES[-1]:
            assert total in SIZES
            filled += 1
    assert filled > 100


def test_above_the_largest_size_steps_are_as_without_sizes():
    few = StepBound(1000.0, replace(COST, sizes=(100, 250)))
    demand = PrefillDemand(8, 4000, 0, 6000, 0)
    assert prefill_budget(few, demand, LIMIT) == prefill_budget(StepBound(1000.0, COST), demand, LIMIT) == 6008


def test_what_would_be_padding_of_a_first_prompt_goes_to_those_behind_it():
    assert prefill_budget(PADDED, PrefillDemand(0, 0, 0, 1100, 500), LIMIT) == 1152
    assert prefill_budget(BOUND, PrefillDemand(0, 0, 0, 1100, 500), LIMIT) == 1100


def test_steps_that_do_not_end_a_prompt_are_full_at_a_multiple():
    rng = random.Random()
    for _ in range(300):
        demand = some_demand(rng)
        tokens = prefill_budget(BOUND, demand, LIMIT)
        if MIN_TOKENS < tokens < demand.tokens:
            assert (demand.decode_rows + tokens) % STEP_MULTIPLE == 0


def test_without_decodes_a_prompt_goes_in_whole():
    for tokens in (1, 100, 1024, 5000):
        assert prefill_budget(BOUND, PrefillDemand(0, 0, 0, tokens, 0), LIMIT) >= tokens
    assert prefill_budget(BOUND, PrefillDemand(0, 0, 0, 50_000, 0), LIMIT) == LIMIT


def test_a_prompt_does_not_wait_for_the_one_behind_it_in_one_long_step():
    assert prefill_budget(BOUND, PrefillDemand(0, 0, 0, 1024, 1024), LIMIT) < 2048


def test_the_bound_gives_way_as_prompts_queue_up_and_never_shrinks_with_them():
    demand = PrefillDemand(32, 32 * 1000, 0, 1024, 0)
    budgets = [prefill_budget(BOUND, replace(demand, queued=queued), LIMIT) for queued in range(1, 9000, 100)]
    assert budgets == sorted(budgets)
    assert milliseconds(demand, budgets[10]) <= BOUND.milliseconds
    assert budgets[-1] == LIMIT


@pytest.mark.parametrize("target", [14.0, 60.0])
def test_what_gives_way_to_a_queue_is_no_more_than_the_largest_captured_step(target):
    """Or, where the bound holds more than that, the bound."""
    bound, rng = replace(PADDED, milliseconds=target), random.Random()
    for _ in range(300):
        queued = rng.choice([500, 5000, 100_000])
        demand = replace(some_demand(rng), load=rng.random(), queued=queued)
        tokens = prefill_budget(bound, demand, LIMIT)
        assert demand.decode_rows + tokens <= SIZES[-1] or milliseconds(demand, tokens, bound) <= 1.001 * target
    demand = PrefillDemand(32, 32 * 1000, 0, 1024, 100_000)
    assert prefill_budget(bound, demand, LIMIT) + 32 >= SIZES[-1], "all of it is used"


def test_prompts_that_come_at_once_while_none_decodes_go_in_captured_steps():
    demand = PrefillDemand(0, 0, 0, 1024, 100_000)
    assert prefill_budget(PADDED, demand, LIMIT) == SIZES[-1]
    assert prefill_budget(PADDED, replace(demand, tokens=5000), LIMIT) == 5000, "the first one whole"


@pytest.mark.parametrize("bound", [BOUND, PADDED], ids=["alone", "padded"])
def test_the_more_time_prompts_take_the_longer_steps_may_up_to_a_limit(bound):
    rng = random.Random()
    for _ in range(100):
        demand = replace(some_demand(rng), tokens=10**6)
        shares = sorted(rng.uniform(0, 1.2) for _ in range(20))
        budgets = [prefill_budget(bound, replace(demand, load=share), LIMIT) for share in (0, *shares)]
        assert budgets == sorted(budgets)
        assert budgets[0] == prefill_budget(bound, demand, LIMIT)
        least = padded(demand.decode_rows + MIN_TOKENS, bound.cost.sizes) - demand.decode_rows
        most = BUSY_BOUNDS * bound.milliseconds
        assert budgets[-1] <= least or milliseconds(demand, budgets[-1], bound) <= most * 1.001


def decodes_milliseconds(demand: PrefillDemand) -> float:
    return COST.decode_milliseconds(demand.decode_rows, demand.decode_kv)


def bound_is_enough(demand: PrefillDemand) -> bool:
    """Whether steps within the bound leave prompts most of the time that they have been taking."""
    return decodes_milliseconds(demand) <= (1 - KEPT_SHARE * demand.load) * BOUND.milliseconds


@pytest.mark.parametrize("bound", [BOUND, PADDED], ids=["alone", "padded"])
def test_load_makes_steps_longer_for_the_first_prompt_and_not_for_pieces_of_others(bound):
    """As long as the bound is enough."""
    rng = random.Random()
    for _ in range(300):
        demand = replace(some_demand(rng), queued=rng.randrange(1, 4000))
        calm = prefill_budget(bound, demand, LIMIT)
        loaded = replace(demand, load=rng.uniform(0, 1))
        busy = prefill_budget(bound, loaded, LIMIT)
        full = padded(demand.decode_rows + demand.tokens, bound.cost.sizes) - demand.decode_rows + STEP_MULTIPLE
        assert calm <= busy
        assert busy <= max(calm, full) or not bound_is_enough(loaded)
        assert busy >= prefill_budget(bound, replace(demand, queued=0), LIMIT)


def test_where_the_bound_is_not_enough_a_queue_is_done_beside_what_prompts_have_been_taking():
    """Of steps of t ms, `base` for decodes, prompts take (t - base) / t: what they have been, and the queue's share of
    the time that it is to be done in. A lonely prompt is no queue."""
    rng, checked = random.Random(), 0
    plain = StepBound(14.0, replace(COST, prefill_pair=0.0))
    while checked < 100:
        demand = replace(some_demand(rng), tokens=10**6, queued=rng.randrange(1, 4000), load=rng.uniform(0, 1))
        base, queue = decodes_milliseconds(demand), demand.queued * COST.token / (QUEUE_STEPS * 14.0)
        left = 1 - KEPT_SHARE * demand.load - queue
        if bound_is_enough(demand) or not 15.0 < base / left < 80.0:
            continue
        taken = milliseconds(demand, prefill_budget(plain, demand, LIMIT), plain)
        alone = milliseconds(demand, prefill_budget(plain, replace(demand, queued=0), LIMIT), plain)
        least = milliseconds(demand, MIN_TOKENS + STEP_MULTIPLE, plain)
        assert base / left - STEP_MULTIPLE * COST.token <= taken <= max(base / left, alone, least)
        assert alone <= max(BUSY_BOUNDS * 14.0, least)
        checked += 1


def test_busy_steps_have_twice_the_time_that_prompts_need():
    """Steps of t ms, of which 6 are for decodes: prompts that take 0.3 of the time need 0.6 of it, so t is 15."""
    rows, load = 8, 0.3
    decodes = (6.0 - COST.step - COST.token * rows) / COST.decode_kv
    demand = PrefillDemand(rows, round(decodes), 0, 10**6, 0, load)
    plain = StepBound(14.0, replace(COST, prefill_pair=0.0))
    taken = milliseconds(demand, prefill_budget(plain, demand, LIMIT), plain)
    assert 15.0 - STEP_MULTIPLE * COST.token <= taken <= 15.0


def test_the_load_of_prompts_is_their_share_of_the_last_seconds():
    load, rng, now, share = PromptLoad(), random.Random(), 100.0, 0.0
    assert load.share(now) == 0
    for share in (0.7, 0.2):
        until = now + 8 * AVERAGE_SECONDS
        while now < until:
            step = rng.uniform(0.005, 0.02)
            load.add(1e3 * share * step, now)
            now += step
        assert load.share(now) == pytest.approx(share, rel=0.05)
    assert load.share(now + AVERAGE_SECONDS) == pytest.approx(share / 2.718, rel=0.05)
    assert load.share(now + 60) < 1e-6


def test_a_step_that_does_little_else_takes_a_share_worth_its_while():
    slow = StepBound(14.0, replace(COST, step=16.0))
    tokens = prefill_budget(slow, PrefillDemand(8, 4000, 0, 4000, 0), LIMIT)
    assert COST.prefill_milliseconds(tokens) >= 14.0


def test_the_scheduler_cuts_prompts_beside_decodes_only():
    sim = simulation(max_batch_tokens=4096, prefill_chunk_tokens=4096, max_model_len=4096, num_granules=2000)
    sim.scheduler.bound_steps(StepBound(14.0, COST))
    endless(sim, 1024, 40)
    assert sim.launch().query_lens.tolist() == [1024]
    sim.complete()
    endless(sim, 1024, 40)
    lens = []
    while len(lens) < 2 or len(lens[-1]) > 2 or lens[-1] != [1, 1]:
        lens.append(sim.launch().query_lens.tolist())
        sim.complete()
    # Two halves, the first in a step of 576 tokens.
    assert lens == [[1, 575], [1, 449], [1, 1]]
    sim.finish()


def test_a_long_queue_is_not_looked_at_to_its_end_in_every_step(monkeypatch):
    """And yet makes steps as long as if it were: 5000 prompts of 2 tokens are 10000."""
    demands, looks = [], 0
    length, budget = Sequence.prefill_range.fget, planner.prefill_budget

    def look(seq: Sequence) -> tuple[int, int]:
        nonlocal looks
        looks += 1
        return length(seq)

    monkeypatch.setattr(Sequence, "prefill_range", property(look))
    monkeypatch.setattr(planner, "prefill_budget", lambda *asked: demands.append(asked[1]) or budget(*asked))
    sim = simulation(max_batch_tokens=4096, prefill_chunk_tokens=4096, max_model_len=4096, num_granules=2000)
    sim.scheduler.bound_steps(StepBound(14.0, replace(COST, token=COST.token / 10)))
    for _ in range(5001):
        sim.add([2, 3], max_tokens=1)
    sim.launch()
    assert looks <= 600
    assert [demand.queued for demand in demands] == [pytest.approx(10_000, rel=0.01)]


def test_chunks_of_any_length_give_the_same_answers(monkeypatch):
    for name in ("MIN_TOKENS", "STEP_MULTIPLE"):
        monkeypatch.setattr(prefill_module, name, 1)
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    sim = Simulation(limits_of(24, 16, 96), spec_of(6, 40, 6, 96), 2, seed=seed)
    traffic, rng = Traffic(sim, seed), random.Random(seed)
    for step in range(300):
        if step % 10 == 0:
            cost = StepCost(0.1, 0.1, rng.choice([0.0, 0.1]), rng.choice([0.0, 0.01]), rng.choice([0.0, 0.01]))
            sim.scheduler.bound_steps(rng.choice([None, StepBound(rng.uniform(0.2, 3), cost)]))
        traffic.step()
        sim.check()
    sim.finish()


def latencies(tool, bound: StepBound | None, rate: float, count: int = 250) -> tuple[float, float, float, float]:
    arrivals = tool.poisson(rate, count, seed=1)
    cost = tool.COST if bound is None else bound.cost
    return tool.SimulatedEngine(bound, launch_ahead=1.5, cost=cost).run(arrivals, 128).percentiles()


def test_the_bound_keeps_tbt_at_moderate_load_for_little_ttft(simulate_policy):
    free, bound = (latencies(simulate_policy, which, 8) for which in (None, PADDED))
    assert bound[3] <= 14.0 < free[3]
    assert bound[0] <= free[0] * 1.2


def test_under_overload_ttft_stays_near_that_without_a_bound(simulate_policy):
    free, bound = (latencies(simulate_policy, which, 36) for which in (None, PADDED))
    assert bound[0] <= free[0] * 1.5


def test_under_overload_no_step_is_longer_than_a_captured_one(simulate_policy):
    _, _, _, longest = latencies(simulate_policy, PADDED, 36)
    captured = PADDED.cost.milliseconds(StepLoad(256, 256 * 1152, SIZES[-1] - 256, 2 * chunk_pairs(0, 1024)))
    assert longest <= captured


def test_near_what_the_device_can_do_load_makes_steps_longer_and_all_waits_shorter(simulate_policy, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(prefill_module, "BUSY_SHARE", 1e9)
        without = latencies(simulate_policy, PADDED, 28)
    ttft, _, tbt, longest = latencies(simulate_policy, PADDED, 28)
    assert ttft < 0.95 * without[0]
    assert tbt <= without[2]
    assert longest <= 1.05 * without[3]


def test_short_prompts_near_what_the_device_can_do_leave_tbt_at_the_bound(simulate_policy):
    """Pieces of other prompts beside each would make all steps longer, for nobody's TTFT."""
    arrivals = simulate_policy.poisson(44, 400, 1, lambda _: 512)
    _, _, _, longest = simulate_policy.SimulatedEngine(PADDED, launch_ahead=1.5).run(arrivals, 128).percentiles()
    assert longest < 1.25 * PADDED.milliseconds


def test_on_a_device_a_little_slower_a_prompt_is_not_cut_once_more(simulate_policy, monkeypatch):
    """A step of 576 tokens takes 14.2 ms there. In three steps a prompt's TTFT was 5 ms longer, at half the load."""
    bound = replace(PADDED, cost=replace(PADDED.cost, token=0.0205))
    ttft, _, _, longest = latencies(simulate_policy, bound, 16, count=1000)
    monkeypatch.setattr(prefill_module, "STRETCHED_STEPS", 0)
    strict = latencies(simulate_policy, bound, 16, count=1000)
    assert ttft < 0.93 * strict[0]
    assert longest < 1.1 * strict[3]


def test_small_queues_make_no_steps_of_two_prompts(simulate_policy, monkeypatch):
    """Load allows one whole prompt beside decodes; two of them took 46 ms, of more than a hundredth of tokens."""
    bound = replace(PADDED, cost=replace(PADDED.cost, token=0.0208))
    ttft, slow, _, longest = latencies(simulate_policy, bound, 24, count=1500)
    assert longest < 2.2 * PADDED.milliseconds
    monkeypatch.setattr(prefill_module, "QUEUE_STEPS", 4)
    monkeypatch.setattr(prefill_module, "WHOLE_SHARE", 2.0)
    earlier = latencies(simulate_policy, bound, 24, count=1500)
    assert earlier[3] > 1.2 * longest
    assert ttft < 1.02 * earlier[0]
    assert slow < 1.05 * earlier[1]


def test_a_closed_loop_needs_no_long_queue_to_go_on(simulate_policy, monkeypatch):
    """256 decodes take most of the bound: steps were long enough for the next prompt where seven were in line."""

    def first_tokens_ms() -> float:
        engine = simulate_policy.SimulatedEngine(PADDED, launch_ahead=1.5, cost=PADDED.cost)
        return engine.run_streams(256, 512, 128, 10 * 256).percentiles()[0]

    ttft = first_tokens_ms()
    monkeypatch.setattr(prefill_module, "KEPT_SHARE", 0.0)
    assert ttft < 0.75 * first_tokens_ms()
