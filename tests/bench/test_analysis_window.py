"""The steady window and over-saturation, on runs made to have or lack them."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from bladellm_tools.bench.columns import columns
from bladellm_tools.bench.metrics import summarise
from bladellm_tools.bench.records import RequestRecord
from bladellm_tools.bench.window import Window, piles_up, steady_window
from tests.bench.synthetic import answered, queue_run, run_of


def stream(rate_at: Callable[[float], float], seconds: float) -> list[RequestRecord]:
    """Requests of one chunk each second-tenth whose tokens make up a given throughput."""
    ticks = np.arange(0.0, seconds, 0.1) + 0.05
    return [answered(t, ttft=0.0, gaps=[], tokens=[max(round(rate_at(t) * 0.1), 1)]) for t in ticks.tolist()]


def window_of(records: list[RequestRecord], warmup: float, duration: float) -> Window:
    return steady_window(columns(records), warmup, duration)


@pytest.mark.parametrize("ramp", [6.0, 10.0, 16.0])
def test_a_ramp_is_cut_to_where_it_ends(ramp: float) -> None:
    window = window_of(stream(lambda t: 1000 * min(1.0, 0.2 + 0.8 * t / ramp), 60.0), 0.0, 60.0)
    assert window.settled
    assert window.end == 60.0
    assert 0.8 * ramp <= window.start <= ramp + 2.0


def test_a_start_burst_is_cut() -> None:
    window = window_of(stream(lambda t: 3000 if t < 7 else 1000, 60.0), 2.0, 60.0)
    assert (window.settled, window.start) == (True, 8.0)


def test_a_steady_run_loses_only_its_warmup() -> None:
    window = window_of(stream(lambda t: 1000, 60.0), 10.0, 60.0)
    assert (window.start, window.end, window.settled, window.note) == (10.0, 60.0, True, "")


def test_small_noise_is_still_steady() -> None:
    rng = np.random.default_rng(0)
    window = window_of(stream(lambda t: float(1000 + 200 * rng.normal()), 60.0), 10.0, 60.0)
    assert window.settled
    assert window.start <= 16.0


@pytest.mark.parametrize(
    ("rate_at", "seconds", "note"),
    [
        (lambda t: 1000, 8.0, "too short"),
        (lambda t: 3000 if int(t) % 7 == 0 else 100, 60.0, "scatters"),
    ],
    ids=["short", "scattered"],
)
def test_a_window_that_cannot_be_found_is_the_rest_and_says_so(
    rate_at: Callable[[float], float], seconds: float, note: str
) -> None:
    window = window_of(stream(rate_at, seconds), 2.0, seconds)
    assert (window.start, window.end, window.settled) == (2.0, seconds, False)
    assert note in window.note
    summary = summarise(run_of(stream(rate_at, seconds), warmup=2.0))
    assert any("only the warm-up was cut" in line for line in summary.notes)


def test_a_ramp_over_the_first_half_leaves_the_second() -> None:
    window = window_of(stream(lambda t: 1000 * 1.2 ** min(t / 2, 15.0), 62.0), 2.0, 62.0)
    assert 26.0 <= window.start <= 32.0
    assert window.settled


def test_requests_that_start_in_the_window_count_though_they_end_after_it() -> None:
    records = [answered(float(i), ttft=30.0) for i in range(41)]
    summary = summarise(run_of(records, warmup=20.0))
    assert summary.completed == 21
    assert summary.values["ttft_mean"] == pytest.approx(30.0)


def share_piling(rho: float, law: str, runs: int = 30) -> float:
    """How often a queue at load `rho` is called over-saturated; 600 requests of 0.1 s each."""
    found = []
    for seed in range(runs):
        run = queue_run(10 * rho, 0.1, count=600, seed=seed, law=law)
        table = columns(run.requests)
        found.append(piles_up(table, Window(5.0, run.duration, True)))
    return float(np.mean(found))


@pytest.mark.parametrize(("rho", "law"), [(0.5, "exponential"), (0.7, "exponential"), (0.8, "constant")])
def test_a_stable_queue_does_not_pile_up(rho: float, law: str) -> None:
    assert share_piling(rho, law) <= 0.1


@pytest.mark.parametrize(("rho", "law"), [(1.3, "exponential"), (1.2, "constant")])
def test_an_overloaded_queue_piles_up(rho: float, law: str) -> None:
    assert share_piling(rho, law) >= 0.9


def share_piling_unqueued(rates: Sequence[float], runs: int = 30) -> float:
    """How often it is said of a server that answers each request in about a second, however many there are. rates: of
    arrivals, one for each 5 s."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        due = np.concatenate([5.0 * i + np.sort(rng.uniform(0, 5, rng.poisson(5 * x))) for i, x in enumerate(rates)])
        took = rng.lognormal(0.0, 0.15, len(due))
        records = [answered(float(at), ttft=float(long), gaps=[]) for at, long in zip(due, took, strict=True)]
        table = columns(records)
        found.append(piles_up(table, Window(3.0, float(due[-1]), True)))
    return float(np.mean(found))


@pytest.mark.parametrize("rates", [[16.0] * 4, [12.0, 14.0, 16.0, 18.0, 20.0], [10.0, 10.0, 10.0, 30.0]])
def test_more_arrivals_alone_are_no_queue(rates: list[float]) -> None:
    assert share_piling_unqueued(rates) <= 0.05


def test_a_cap_on_requests_in_flight_does_not_hide_the_queue() -> None:
    """The client lets four through at a time: what waits for its turn is queueing all the same."""
    records, free = [], [0.0] * 4
    for i in range(400):
        due = 0.125 * i
        start = max(due, min(free))
        free[free.index(min(free))] = start + 1.0
        records.append(answered(due, lag=start - due, ttft=0.25, gaps=[0.75]))
    summary = summarise(run_of(records, warmup=5.0))
    assert summary.values["in_flight_peak"] <= 4
    assert summary.oversaturated


def test_filling_up_at_the_start_is_not_piling_up() -> None:
    """Requests of 8 s: the count rises from 0 for 8 s and then stays."""
    records = [answered(0.1 * i, ttft=1.0, gaps=[0.1] * 70) for i in range(300)]
    assert not summarise(run_of(records, warmup=0.0)).oversaturated


@pytest.mark.parametrize(("warmup", "duration"), [(0.0, 1e12), (-1e300, 9.0), (0.0, 1e300)])
def test_times_of_damaged_results_take_no_memory(warmup: float, duration: float) -> None:
    window = window_of(stream(lambda _: 100.0, 9), warmup, duration)
    assert not window.settled
    assert "too long" in window.note
