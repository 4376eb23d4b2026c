"""A against A shows no difference, a known difference is found, and what does not count is left out."""

import numpy as np
import pytest

from bladellm_tools.bench.compare import RATES, VERTICAL, Ratio, compare
from bladellm_tools.bench.records import LevelRun, Load, Outcome
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.stats import Interval
from bladellm_tools.bench.tables import pair_text
from tests.bench.synthetic import answered, benchmark_of, failed, queue_run, run_of
from tests.support.cases import drawn_of

SERVICE = 0.1
LEVELS = (1.0, 2.0, 3.0, 4.5, 6.0)


def curve(
    endpoint: str, *, repeats: int, seed: int, slower: float = 1.0, levels: tuple[float, ...] = LEVELS
) -> list[LevelRun]:
    return [
        queue_run(qps, SERVICE, seed=seed, endpoint=endpoint, repeat=repeat, slower=slower)
        for qps in levels
        for repeat in range(repeats)
    ]


@pytest.mark.parametrize("repeats", drawn_of([1, 3], 1))
def test_a_against_a_shows_no_difference(repeats: int) -> None:
    """Same server, other noise: nine of ten intervals hold 1."""
    holds = []
    for seed in range(6):
        runs = curve("a", repeats=repeats, seed=2 * seed) + curve("b", repeats=repeats, seed=2 * seed + 1)
        (pair,) = compare(benchmark_of(runs), []).pairs
        assert len(pair.vertical) == len(LEVELS) * len(VERTICAL)
        ratios = [row.ratio for row in pair.vertical if not row.mark]
        holds += [ratio.interval.contains(1.0) for ratio in ratios if ratio and ratio.interval]
    assert len(holds) >= 80
    assert np.mean(holds) >= 0.9


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_known_factor_is_recovered_vertically(repeats: int) -> None:
    """The same requests, every time doubled: `compare` replays one schedule against both."""
    runs = curve("fast", repeats=repeats, seed=1) + curve("slow", repeats=repeats, seed=1, slower=2.0)
    (pair,) = compare(benchmark_of(runs), []).pairs
    for row in pair.vertical:
        assert row.ratio is not None
        assert row.ratio.value == pytest.approx(0.5, rel=0.05)
        assert row.ratio.inverse.value == pytest.approx(2, rel=0.05)
        # One run has too few independent waits beyond its p99 to say how sure it is.
        assert (row.ratio.interval is None) == (repeats == 1 and row.figure == "ttft_p99")
        assert row.ratio.interval is None or row.ratio.interval.contains(row.ratio.value)
    sentences = dict(zip(VERTICAL, pair.summary, strict=True))
    assert ("more --repeats" in sentences["ttft_p99"]) == (repeats == 1)
    assert sentences["ttft_p50"] == "TTFT p50 of fast is 2× lower than of slow between 1 and 6 QPS."


def loop(endpoint: str, streams: int, repeat: int, seconds: float) -> LevelRun:
    """Each stream asks again when it has been answered, after so many seconds; for about a minute."""
    gaps = (seconds / 10,) * 9
    records = [
        answered(stream * seconds / streams + turn * seconds, ttft=seconds / 10, gaps=gaps)
        for turn in range(int(60 / seconds))
        for stream in range(streams)
    ]
    return run_of(records, load=Load(concurrency=streams), endpoint=endpoint, repeat=repeat)


@pytest.mark.parametrize("repeats", [1, 3])
def test_closed_loops_are_compared_by_what_they_get_done(repeats: int) -> None:
    """As many streams whose requests take 1.5 times as long get two thirds of them done."""
    runs = [
        loop(endpoint, streams, repeat, seconds * (1 + 0.01 * repeat))
        for streams in (8, 32)
        for repeat in range(repeats)
        for endpoint, seconds in (("fast", 1.0), ("slow", 1.5))
    ]
    (pair,) = compare(benchmark_of(runs), []).pairs
    assert [row.figure for row in pair.rates] == 2 * list(RATES)
    for row in pair.rates:
        assert row.first == pytest.approx((row.load.concurrency or 0) * (10 if "tokens" in row.figure else 1), rel=0.03)
        assert row.ratio is not None
        assert row.ratio.value == pytest.approx(1.5, rel=0.02)
        assert (row.ratio.interval is None) == (repeats == 1)
    # One run has no interval, and carries no claim.
    said = "is 1.5× higher than of slow between" if repeats > 1 else "over slow is 1.5× between"
    assert pair.summary[0].startswith(f"requests/s of fast {said} 8 and 32 streams")
    assert len(pair.summary) == len(RATES) + len(VERTICAL)
    first, *_ = pair_text(pair).split("\n\n")
    assert [line.split()[2] for line in first.splitlines()[1:]] == ["requests/s", "output"] * 2


@pytest.mark.parametrize("repeats", drawn_of([3, 1], 1))
def test_a_known_factor_is_recovered_horizontally(repeats: int) -> None:
    """Half the service time carries twice the load at any latency that is twice as high: at the same limit more so."""
    fast = [
        queue_run(qps, 0.05, count=3000, seed=3, endpoint="fast", repeat=repeat, law="constant")
        for qps in (4.0, 8.0, 12.0, 14.0, 16.0, 18.0)
        for repeat in range(repeats)
    ]
    slow = [
        queue_run(qps, 0.1, count=3000, seed=3, endpoint="slow", repeat=repeat, law="constant", slower=0.5)
        for qps in (2.0, 4.0, 6.0, 7.0, 8.0, 9.0)
        for repeat in range(repeats)
    ]
    (pair,) = compare(benchmark_of(fast + slow), parse_slo(["ttft_p50=90ms", "ttft_p90=200ms"])).pairs
    for row in pair.horizontal:
        assert (row.first.kind, row.second.kind) == ("at", "at")
        assert row.ratio is not None
        assert row.ratio.value == pytest.approx(2, rel=0.05)
        assert row.ratio.interval is not None
        assert row.ratio.interval.contains(2.0)
    assert pair.summary[-2].startswith("fast carries 2")
    assert "× the QPS of slow at TTFT p50 ≤ 90 ms" in pair.summary[-2]


def test_a_crossing_only_one_endpoint_has_bounds_the_ratio() -> None:
    runs = curve("fast", repeats=1, seed=1) + curve("slow", repeats=1, seed=1, slower=20.0)
    limits = parse_slo(["ttft_p50=2.5s", "ttft_p90=1us"])
    (row, past) = compare(benchmark_of(runs), limits).pairs[0].horizontal
    assert (row.first.kind, row.second.kind) == ("above", "at")
    assert row.ratio is not None
    assert row.ratio.bound == "at least"
    assert row.ratio.inverse.bound == "at most"
    assert (past.first.kind, past.second.kind, past.ratio) == ("below", "below", None)


def test_levels_that_do_not_count_are_marked_and_left_out_of_the_words() -> None:
    runs = curve("a", repeats=1, seed=1) + curve("b", repeats=1, seed=1, slower=2.0)
    limited = next(run for run in runs if run.endpoint == "b" and run.load.qps == 6.0)
    limited.client.limited = True
    overloaded = [queue_run(15.0, SERVICE, endpoint=name, count=900) for name in ("a", "b")]
    (pair,) = compare(benchmark_of(runs + overloaded), []).pairs
    marks = {row.load.qps: row.mark for row in pair.vertical}
    assert marks[1.0] == ""
    assert marks[6.0] == "b client-limited"
    assert marks[15.0] == "a over-saturated, b over-saturated"
    assert all(row.ratio is None for row in pair.vertical if row.load.qps == 6.0)
    assert all("between 1 and 4.5 QPS" in sentence for sentence in pair.summary)


def test_no_claim_is_made_where_no_level_shows_a_difference() -> None:
    """Levels of two runs have intervals, which hold 1; one of few requests has none, and cannot carry a claim."""
    runs = [queue_run(2.0, SERVICE, endpoint=name, repeat=repeat, seed=repeat) for name in "ab" for repeat in range(2)]
    few = [queue_run(4.0, SERVICE, endpoint=name, count=12) for name in "ab"]
    (pair,) = compare(benchmark_of(runs + few), []).pairs
    assert "is 1× between 2 and 4 QPS: no level shows a difference; 1 of 2 levels are too short" in pair.summary[0]


def test_a_server_that_only_fails_is_compared_without_a_ratio() -> None:
    dead = run_of([failed(float(i), Outcome.CONNECT, None) for i in range(50)], endpoint="dead", load=Load(qps=1.0))
    (pair,) = compare(benchmark_of([queue_run(1.0, SERVICE, endpoint="a"), dead]), parse_slo(["ttft_p99=1s"])).pairs
    assert {row.mark for row in pair.vertical} == {"too few completions"}
    assert "no level" in pair.summary[0]
    assert pair.horizontal[0].second.kind == "below"


def test_every_other_endpoint_is_compared_with_the_first() -> None:
    runs = [queue_run(2.0, SERVICE, endpoint=name) for name in ("a", "b", "c")]
    comparison = compare(benchmark_of(runs), [])
    assert [(pair.first, pair.second) for pair in comparison.pairs] == [("a", "b"), ("a", "c")]
    assert len(comparison.figures) == 3
    assert compare(benchmark_of(runs[:1]), []).pairs == ()
    assert compare(benchmark_of([]), []).pairs == ()


def test_endpoints_without_a_common_level_have_only_a_horizontal_ratio() -> None:
    runs = [queue_run(qps, SERVICE, endpoint=name) for name, qps in (("a", 2.0), ("b", 3.0))]
    (pair,) = compare(benchmark_of(runs), parse_slo(["ttft_p50=1ms"])).pairs
    assert pair.vertical == ()
    assert len(pair.summary) == len(VERTICAL) + 1


def test_the_inverse_swaps_the_ends() -> None:
    ratio = Ratio(0.5, Interval(0.4, 0.8), "at least")
    assert ratio.inverse == Ratio(2.0, Interval(1.25, 2.5), "at most")
