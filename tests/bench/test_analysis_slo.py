"""Limits are read exactly, and crossings found where theory puts them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.capacity import capacity, isotonic, monotone_crossing
from bladellm_tools.bench.figures import LevelFigures, combine
from bladellm_tools.bench.metrics import summarise
from bladellm_tools.bench.records import Load, Outcome
from bladellm_tools.bench.slo import METRICS, PERCENTILES, SloLimit, parse_slo
from tests.bench.synthetic import answered, failed, run_of

LEVELS = (1.0, 2.0, 4.0, 6.0, 8.0, 9.0)
SERVICE_RATE = 10.0
TTFT_P50 = SloLimit("ttft", "p50", 0.5)


def level_at(
    qps: float, ttft: float, *, repeats: int = 1, jitter: float = 0.0, failing: float = 0.0, growing: bool = False,
    limited: bool = False,
) -> LevelFigures:  # fmt: skip
    """A level whose TTFT is known; `growing` makes it over-saturated, `failing` is the share that fails."""
    runs = []
    for repeat in range(repeats):
        rng = np.random.default_rng([int(1000 * qps), repeat])
        shift = float(np.exp(jitter * rng.normal()))
        wait = (0.05 if growing else 0.0) * np.arange(240)
        records = [answered(i / qps, ttft=ttft * shift + float(wait[i])) for i in range(240)]
        for place in range(round(240 * failing)):
            records[place * 240 // round(240 * failing)] = failed(place * 240 // round(240 * failing) / qps)
        runs.append(run_of(records, load=Load(qps=qps), repeat=repeat, limited=limited))
    return combine([summarise(run) for run in runs])


def mm1(qps: float) -> float:
    """Mean sojourn time of M/M/1."""
    return 1 / (SERVICE_RATE - qps)


@pytest.mark.parametrize(
    ("text", "metric", "percentile", "seconds", "shown"),
    [
        ("ttft_p99=500ms", "ttft", "p99", 0.5, "TTFT p99 ≤ 500 ms"),
        ("tbt_p50 = 800us", "tbt", "p50", 8e-4, "TBT p50 ≤ 800 us"),
        ("e2e_p99.9=1.5s", "e2e", "p99.9", 1.5, "E2E p99.9 ≤ 1.5 s"),
        ("tpot_p90=1e3ms", "tpot", "p90", 1.0, "TPOT p90 ≤ 1 s"),
    ],
)
def test_limits_are_read(text: str, metric: str, percentile: str, seconds: float, shown: str) -> None:
    (limit,) = parse_slo([text])
    assert (limit.metric, limit.percentile, limit.text) == (metric, percentile, shown)
    assert limit.seconds == pytest.approx(seconds)


def test_limits_may_share_a_string() -> None:
    assert [limit.figure for limit in parse_slo(["ttft_p99=1s, tbt_p99=50ms", "e2e_p50=9s"])] == [
        "ttft_p99",
        "tbt_p99",
        "e2e_p50",
    ]
    assert parse_slo([]) == []


@pytest.mark.parametrize(
    "text",
    ["ttft=1s", "ttft_p99", "itl_p99=1s", "ttft_p98=1s", "ttft_p99=5", "ttft_p99=5min", "ttft_p99=-1s", "ttft_p99=0ms",
     "ttft_p99=1e999s", "ttft_p99=1e-s", "ttft_p99=nans", "=", "ttft_p99==1s"],
)  # fmt: skip
def test_a_limit_that_cannot_be_read_names_what_can(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_slo([text])
    assert repr(text) in str(caught.value)
    assert "ttft_p99=500ms" in str(caught.value)


def test_the_usage_names_every_choice() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_slo(["nonsense"])
    assert all(name in str(caught.value) for name in (*METRICS, *PERCENTILES, "us", "ms"))
    with pytest.raises(ConfigError, match="twice"):
        parse_slo(["ttft_p99=1s", "ttft_p99=2s"])


@pytest.mark.parametrize("seconds", [0.12, 0.15, 0.2, 0.3, 0.45, 0.7])
def test_the_crossing_of_a_queue_is_where_theory_puts_it(seconds: float) -> None:
    """M/M/1: a sojourn time of w is reached at the service rate less 1/w."""
    crossing = capacity([level_at(qps, mm1(qps)) for qps in LEVELS], SloLimit("ttft", "p50", seconds))
    assert crossing.kind == "at"
    assert crossing.qps == pytest.approx(SERVICE_RATE - 1 / seconds, rel=0.05)


def test_the_crossing_has_an_interval() -> None:
    levels = [level_at(qps, mm1(qps), repeats=5, jitter=0.1) for qps in LEVELS]
    crossing = capacity(levels, SloLimit("ttft", "p50", 0.25))
    assert crossing.interval is not None
    assert crossing.interval.contains(6.0)
    assert 0.05 < crossing.interval.high - crossing.interval.low < 2.0


def test_a_curve_that_never_crosses_is_censored() -> None:
    levels = [level_at(qps, mm1(qps)) for qps in LEVELS]
    above, below = capacity(levels, SloLimit("ttft", "p50", 5.0)), capacity(levels, SloLimit("ttft", "p50", 0.05))
    assert (above.kind, above.qps, above.text) == ("above", 9.0, "above 9 QPS")
    assert (below.kind, below.qps, below.text) == ("below", 1.0, "below 1 QPS")
    assert capacity([], TTFT_P50).kind == "unknown"
    assert capacity(levels, SloLimit("ttft", "p99.9", 1.0)).text == "unknown"  # too few completions anywhere


def test_levels_the_client_limited_do_not_count() -> None:
    levels = [level_at(1, 0.1), level_at(2, 0.1), level_at(4, 9.0, limited=True)]
    assert capacity(levels, TTFT_P50).text == "above 2 QPS"


def test_a_server_that_sheds_load_does_not_keep_its_limit() -> None:
    """The survivors at 4 QPS are quick, but more fail than p99 leaves out."""
    levels = [level_at(1, 0.1), level_at(2, 0.1), level_at(4, 0.1, failing=0.05), level_at(6, 0.1, failing=0.5)]
    crossing = capacity(levels, SloLimit("ttft", "p99", 0.5))
    assert (crossing.kind, crossing.qps) == ("at", 2.0)
    assert "fail at 4 QPS" in crossing.note
    assert capacity(levels[2:], SloLimit("ttft", "p99", 0.5)).kind == "below"
    assert capacity(levels[:3], TTFT_P50).kind == "above"  # half may fail a median


def test_all_failing_is_past_every_limit() -> None:
    dead = combine([summarise(run_of([failed(float(i), Outcome.CONNECT, None) for i in range(50)], load=Load(qps=4)))])
    crossing = capacity([level_at(2, 0.1), dead], SloLimit("ttft", "p99", 0.5))
    assert (crossing.kind, crossing.qps) == ("at", 2.0)


def test_beyond_over_saturation_nothing_is_trusted() -> None:
    """An over-saturated level that is still within the limit only had too little time to leave it."""
    short = [level_at(2, 0.1), level_at(4, 0.1, growing=True), level_at(6, 0.1)]
    assert short[1].oversaturated
    assert capacity(short, SloLimit("ttft", "p50", 60.0)).text == "above 2 QPS"
    crossed = capacity(short, SloLimit("ttft", "p50", 1.0))
    assert crossed.kind == "at"
    assert crossed.qps is not None
    assert 2 < crossed.qps < 4
    assert "over-saturated" in crossed.note


def test_closed_loops_cross_at_the_rate_they_achieve() -> None:
    levels = []
    for streams in (1, 2, 4, 8):
        takes = 0.2 * max(1.0, streams / 4)
        records = [
            answered(turn * takes, ttft=takes, gaps=[], tokens=[1]) for turn in range(60) for _ in range(streams)
        ]
        levels.append(combine([summarise(run_of(records, load=Load(concurrency=streams), duration=59 * takes))]))
    crossing = capacity(levels, SloLimit("ttft", "p50", 0.3))
    assert crossing.kind == "at"
    assert crossing.qps == pytest.approx(20, rel=0.1)


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=30))
def test_isotonic_rises_and_is_nearest(values: list[float]) -> None:
    """Against the closed form: the largest, over starts, of the least mean over ends."""
    found = isotonic(np.array(values))
    assert (np.diff(found) >= -1e-9).all()
    for i in range(len(values)):
        means = [[np.mean(values[a : b + 1]) for b in range(i, len(values))] for a in range(i + 1)]
        assert found[i] == pytest.approx(max(min(row) for row in means), abs=1e-6)


@given(
    steps=st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 10)), min_size=1, max_size=10),
    share=st.floats(0.01, 0.99),
)
def test_a_monotone_crossing_lies_between_its_neighbours(steps: list[tuple[float, float]], share: float) -> None:
    places = np.concatenate(([0.0], np.cumsum([step for step, _ in steps])))
    values = np.concatenate(([0.0], np.cumsum([rise for _, rise in steps])))
    line = share * values[-1]
    if not (values > line).any():
        return
    after = int(np.argmax(values > line))
    assert places[after - 1] <= monotone_crossing(places, values, line) <= places[after]
