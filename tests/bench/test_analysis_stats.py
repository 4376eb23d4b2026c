"""Intervals hold the truth as often as they say, by simulation against known distributions."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_tools.bench.stats import (
    Interval,
    Samples,
    block_length,
    bootstrap_ratio,
    coefficient_of_variation,
    correlation_time,
    paired_ratio,
    ratio_interval,
    student_quantile,
    t_interval,
    trend,
)
from tests.support.cases import drawn_of

TRIALS = 200


def held(intervals: list[Interval | None], truth: float) -> float:
    """Share of the intervals that contain the truth."""
    return float(np.mean([interval is not None and interval.contains(truth) for interval in intervals]))


def plain(values: np.ndarray) -> Samples:
    return Samples.of(values, np.ones(len(values)), np.arange(len(values)), len(values))


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (9, 2.26216),
        (10, 2.22814),
        (99, 1.98422),
        (1000, 1.96234),
    ],
)
def test_student_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.975, freedom) == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_t_intervals_hold_the_mean(runs: int) -> None:
    rng = np.random.default_rng(runs)
    share = held([t_interval(rng.normal(5, 1, runs).tolist()) for _ in range(4 * TRIALS)], 5.0)
    assert 0.93 <= share <= 0.97


@pytest.mark.parametrize("count", [100, 400, 3000])
def test_bootstrap_means_hold_the_mean(count: int) -> None:
    rng = np.random.default_rng(count)
    share = held([plain(rng.exponential(2.0, count)).mean_interval() for _ in range(TRIALS)], 2.0)
    assert 0.90 <= share <= 0.99


SHARES = [(0.5, 100), (0.5, 1000), (0.9, 300), (0.95, 500), (0.99, 2000)]


@pytest.mark.parametrize("case", drawn_of(SHARES, 1, always=[(0.99, 2000)]), ids=str)
def test_bootstrap_percentiles_hold_the_percentile(case: tuple[float, int]) -> None:
    share, count = case
    rng = np.random.default_rng(int(1000 * share) + count)
    truth = -2.0 * math.log(1 - share)
    found = [plain(rng.exponential(2.0, count)).percentile_interval(share) for _ in range(TRIALS)]
    assert 0.90 <= held(found, truth) <= 0.99


def test_blocks_keep_dependence() -> None:
    """An AR(1) series with correlation 0.6: intervals that took requests for independent would hold half as often."""
    rng = np.random.default_rng(1)
    found, naive = [], []
    for _ in range(TRIALS):
        noise = rng.normal(0, 1, 1100)
        series = np.zeros(1100)
        for i in range(1, 1100):
            series[i] = 0.6 * series[i - 1] + noise[i]
        values = series[100:]
        found.append(bootstrap_ratio(values, np.ones(1000)))
        margin = 1.96 * values.std() / math.sqrt(1000)
        naive.append(Interval(values.mean() - margin, values.mean() + margin))
    assert held(naive, 0.0) < 0.75
    assert 0.88 <= held(found, 0.0) <= 0.99


def test_token_weighted_percentiles_are_bootstrapped_by_request() -> None:
    """Tokens of one request are alike: the interval must be that of 300 requests, not of 9,000 tokens."""
    rng = np.random.default_rng(2)
    found = []
    for _ in range(TRIALS):
        speeds = np.repeat(rng.exponential(1.0, 300), 30)
        found.append(Samples.of(speeds, np.ones(9000), np.repeat(np.arange(300), 30), 300).percentile_interval(0.9))
    assert 0.90 <= held(found, math.log(10)) <= 0.99


def test_ratios_of_independent_quantities_hold_the_ratio() -> None:
    rng = np.random.default_rng(4)
    found = []
    for _ in range(TRIALS):
        a, b = plain(rng.exponential(3.0, 300)), plain(rng.exponential(1.5, 200))
        found.append(ratio_interval(a.mean() or 0, a.mean_interval(), b.mean() or 0, b.mean_interval()))
    assert 0.90 <= held(found, 2.0) <= 0.99


def test_paired_ratios_cancel_what_the_pair_shares() -> None:
    """Runs differ wildly, their ratio does not."""
    rng = np.random.default_rng(6)
    shared = rng.lognormal(0, 1, 5)
    value, interval = paired_ratio((2 * shared * rng.lognormal(0, 0.01, 5)).tolist(), shared.tolist())
    assert value == pytest.approx(2, rel=0.02)
    assert interval is not None
    assert interval.high / interval.low < 1.06


def test_the_same_data_give_the_same_interval() -> None:
    values = np.random.default_rng(8).exponential(1, 500)
    assert plain(values).percentile_interval(0.9) == plain(values.copy()).percentile_interval(0.9)
    assert plain(values).mean_interval() == plain(values.copy()).mean_interval()


def test_unrelated_requests_are_drawn_one_by_one() -> None:
    rng = np.random.default_rng(9)
    lengths = [block_length(rng.normal(size=400)) for _ in range(50)]
    assert np.median(lengths) == 1
    assert block_length(np.sin(np.arange(400) / 20)) > 20


def test_the_correlation_time_of_an_autoregression_is_that_of_theory() -> None:
    rng = np.random.default_rng(12)
    series = np.zeros(50_000)
    for i in range(1, len(series)):
        series[i] = 0.8 * series[i - 1] + rng.normal()
    assert correlation_time(series) == pytest.approx(9, rel=0.15)
    assert correlation_time(rng.normal(size=50_000)) == 1.0


def test_a_queue_at_its_tail_has_no_interval() -> None:
    """Sixty waits in one burst are one witness: better no interval than one that is too narrow."""
    burst = np.concatenate((np.random.default_rng(13).exponential(1, 540), 20 + np.arange(60.0)))
    assert plain(burst).percentile_interval(0.95) is None
    assert plain(np.random.default_rng(13).permutation(burst)).percentile_interval(0.95) is not None


def test_variation() -> None:
    assert coefficient_of_variation([1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert coefficient_of_variation([1.0]) is None
    assert coefficient_of_variation([0.0, 0.0]) is None


def test_the_least_slope_is_below_the_true_one() -> None:
    rng = np.random.default_rng(10)
    times = np.arange(12.0)
    lines = [trend(times, 3 * times + rng.normal(0, 5, 12)) for _ in range(TRIALS)]
    assert np.mean([line is not None and line.least <= 3 for line in lines]) >= 0.95
    assert trend(times[:3], times[:3]) is None
    assert trend(1e-200 * times, times) is None  # the squares of such distances are 0
    assert trend(np.full(5, 7.0), times[:5]) is None


@given(
    pairs=st.lists(st.tuples(st.floats(0, 1e6), st.integers(1, 9)), min_size=1, max_size=50),
    share=st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]),
)
def test_weighted_percentiles_are_those_of_repeated_values(pairs: list[tuple[float, int]], share: float) -> None:
    values, weights = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    found = Samples.of(values, weights, np.arange(len(values)), len(values)).percentile(share)
    repeated = np.sort(np.repeat(values, weights.astype(int)))
    # The least value that at least this share does not exceed, by counting.
    expected = next(x for x in repeated if np.mean(repeated <= x) >= share - 1e-9)
    assert found == expected
