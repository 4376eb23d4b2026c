"""The line that step times are fitted to: what it finds again, and what it predicts."""

import random
from dataclasses import astuple, replace

import pytest

from bladellm_runtime.scheduler.step_cost import StepCost, StepLoad, chunk_pairs, fit_step_cost, padded

LOADS = [
    StepLoad(rows, rows * context, tokens, chunk_pairs(start, tokens))
    for rows, context in ((0, 0), (8, 600), (16, 1100), (64, 300))
    for tokens, start in ((256, 0), (512, 512), (1024, 0), (1500, 3000))
]


def random_cost(rng: random.Random) -> StepCost:
    return StepCost(
        step=rng.uniform(1, 20), token=rng.uniform(0.01, 0.1), decode_row=rng.uniform(0, 0.1),
        decode_kv=rng.uniform(1e-5, 1e-4), prefill_pair=rng.uniform(5e-7, 5e-6),
    )  # fmt: skip


def test_a_line_is_found_again_from_times_on_it():
    rng = random.Random()
    for _ in range(5):
        cost = random_cost(rng)
        found = fit_step_cost([(load, cost.milliseconds(load)) for load in LOADS])
        for load in LOADS:
            assert found.milliseconds(load) == pytest.approx(cost.milliseconds(load), rel=0.01)


def test_noise_and_a_floor_make_no_cost_negative():
    rng = random.Random()
    cost = random_cost(rng)
    noisy = [(load, max(30.0, cost.milliseconds(load)) * rng.uniform(0.7, 1.5)) for load in LOADS]
    found = fit_step_cost(noisy)
    assert min(astuple(found)[:5]) >= 0
    # Of two lines, that with the smaller squares of relative errors is the fit.
    for other in (cost, StepCost(30.0, 0, 0, 0, 0)):
        squares = [sum((line.milliseconds(load) / time - 1) ** 2 for load, time in noisy) for line in (found, other)]
        assert squares[0] <= squares[1] * 1.001


def test_a_step_takes_as_long_as_one_of_the_size_it_is_padded_to():
    rng = random.Random()
    cost = replace(
        random_cost(rng), decode_row=0.0, prefill_pair=0.0, sizes=tuple(sorted(rng.sample(range(1, 900), 5)))
    )
    for _ in range(100):
        rows, tokens = rng.randrange(50), rng.randrange(1, 1000)
        larger = [size for size in cost.sizes if size >= rows + tokens]
        total = min(larger, default=rows + tokens)
        assert padded(rows + tokens, cost.sizes) == total
        alone = cost.step + cost.token * total
        assert cost.milliseconds(StepLoad(rows, 0, tokens, 0)) == pytest.approx(alone)


def test_a_line_is_found_again_from_padded_steps_only_where_their_sizes_are_known():
    rng = random.Random()
    cost = replace(random_cost(rng), sizes=(300, 700, 1400))
    times = [(load, cost.milliseconds(load)) for load in LOADS]
    known, unknown = fit_step_cost(times, cost.sizes), fit_step_cost(times)
    assert known.sizes == cost.sizes
    for load, time in times:
        assert known.milliseconds(load) == pytest.approx(time, rel=0.01)
    assert max(abs(unknown.milliseconds(load) / time - 1) for load, time in times) > 0.01


def test_no_measurement_is_an_error():
    with pytest.raises(ValueError, match="measured"):
        fit_step_cost([])


def test_prefill_tokens_are_the_most_that_take_the_time_given():
    rng = random.Random()
    for _ in range(50):
        cost, start, room = random_cost(rng), rng.randrange(20_000), rng.uniform(0.1, 200)
        tokens = cost.prefill_tokens(room, start)

        def extra(count: int, cost=cost, start=start) -> float:
            without = cost.decode_milliseconds(3, 500)
            return cost.milliseconds(StepLoad(3, 500, count, chunk_pairs(start, count))) - without

        # One token more or less: half a pair a token is left out.
        assert extra(tokens - 1) <= room * 1.001
        assert extra(tokens + 2) >= room * 0.999


def test_no_room_is_no_token_and_no_cost_no_bound():
    cost = random_cost(random.Random())
    assert cost.prefill_tokens(0.0, 0) == cost.prefill_tokens(-3.0, 10) == 0
    assert cost.prefill_tokens(float("inf"), 10) > 10**6
    assert StepCost(1, 0, 0, 0, 0).prefill_tokens(0.5, 10) > 10**6


def test_pairs_of_chunks_add_up_to_those_of_the_prompt():
    rng = random.Random()
    cuts = sorted(rng.sample(range(1, 300), 4))
    bounds = list(zip([0, *cuts], [*cuts, 300], strict=True))
    pairs = sum(chunk_pairs(start, end - start) for start, end in bounds)
    assert pairs == sum(query + 1 for query in range(300))
