"""Every figure against a run where it is known."""

import time

import numpy as np
import pytest

from bladellm_tools.bench.columns import columns, request_metrics
from bladellm_tools.bench.figures import combine
from bladellm_tools.bench.metrics import FIGURES, STATISTICS, summarise
from bladellm_tools.bench.records import Load, Outcome, RequestRecord
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.window import in_flight_over_time
from tests.bench.synthetic import answered, failed, queue_run, run_of

MERGES = (1, 2, 3, 4, 7)


def test_the_metrics_of_one_request() -> None:
    record = answered(5.0, lag=0.25, ttft=0.5, gaps=[0.1, 0.4, 0.1], tokens=[1, 1, 4, 2])
    found = {name: values[0] for name, values in request_metrics(columns([record])).items()}
    assert found == pytest.approx(
        {
            "ttfb": 0.5,
            "ttft": 0.75,
            "ttft_service": 0.5,
            "tpot": 0.6 / 7,
            "e2e": 1.35,
            "e2e_service": 1.1,
            "max_stall": 0.4,
            "tokens_per_chunk": 2.0,
        }
    )


def test_merged_chunks_do_not_change_tbt() -> None:
    """Four tokens every 40 ms are a TBT of 10 ms at every percentile; the raw gap is 40 ms."""
    records = [answered(0.01 * i, gaps=[0.04] * 30, tokens=[4] * 31) for i in range(1000)]
    values = summarise(run_of(records)).values
    for statistic in ("mean", "p50", "p90", "p95", "p99", "p99.9"):
        assert values[f"tbt_{statistic}"] == pytest.approx(0.01)
        assert values[f"chunk_gap_{statistic}"] == pytest.approx(0.04)
    assert values["tokens_per_chunk"] == 4.0


def test_tbt_counts_each_token_whatever_the_chunks() -> None:
    """Against the plain list of one value a token, with chunks of any size."""
    rng = np.random.default_rng(7)
    records, per_token = [], []
    for i in range(250):
        size = int(rng.integers(2, 40))
        tokens, gaps = rng.choice(MERGES, size), rng.exponential(0.02, size - 1)
        records.append(answered(0.04 * i, gaps=gaps, tokens=tokens.tolist()))
        per_token += np.repeat(np.diff(records[-1].times) / tokens[1:], tokens[1:]).tolist()
    values = summarise(run_of(records)).values
    assert values["tbt_mean"] == pytest.approx(np.mean(per_token))
    assert values["tbt_std"] == pytest.approx(np.std(per_token))
    for share in (50, 90, 95, 99):
        assert values[f"tbt_p{share}"] == pytest.approx(np.percentile(per_token, share, method="inverted_cdf"))


def test_a_chunk_without_a_token_lends_its_wait_to_the_next() -> None:
    values = summarise(run_of([answered(0.0, gaps=[0.01, 0.02, 0.03], tokens=[0, 1, 0, 1])])).values
    assert values["tbt_mean"] == pytest.approx((0.01 + 0.05) / 2)
    assert values["chunk_gap_mean"] == pytest.approx(0.02)


@pytest.mark.parametrize("metric", ["ttft", "e2e", "tpot", "max_stall"])
def test_percentiles_are_those_of_the_values(metric: str) -> None:
    rng = np.random.default_rng(3)
    ttfts = rng.lognormal(-2, 1, 1100)
    records = [answered(0.01 * i, ttft=x, gaps=rng.exponential(0.01, 9)) for i, x in enumerate(ttfts.tolist())]
    values = summarise(run_of(records)).values
    truth = request_metrics(columns(records))[metric]
    for name, share in {"p50": 50, "p90": 90, "p95": 95, "p99": 99, "p99.9": 99.9}.items():
        assert values[f"{metric}_{name}"] == pytest.approx(np.percentile(truth, share, method="inverted_cdf"))


@pytest.mark.parametrize(
    ("count", "empty"), [(199, {"p99", "p99.9"}), (200, {"p99.9"}), (999, {"p99.9"}), (1000, set())]
)
def test_high_percentiles_need_completions(count: int, empty: set[str]) -> None:
    records = [answered(0.01 * i) for i in range(count)] + [failed(0.001) for _ in range(300)]
    values = summarise(run_of(records)).values
    for metric in ("ttft", "tbt", "e2e"):
        assert {statistic for statistic in STATISTICS if values[f"{metric}_{statistic}"] is None} == empty


def test_failures_are_counted_and_never_averaged() -> None:
    good = [answered(float(i)) for i in range(30)]
    bad = [failed(0.5), failed(1.5, Outcome.TIMEOUT, None), failed(2.5, Outcome.CUT, 200), failed(3.5, status=429)]
    bad[2].times, bad[2].tokens, bad[2].completion_tokens = [2.6, 9.0], [1, 1], 2
    summary = summarise(run_of(good + bad), parse_slo(["ttft_p99=10s"]))
    alone = summarise(run_of(good))
    same = [f"{metric}_mean" for metric in ("ttft", "tbt", "e2e", "max_stall", "tpot")]
    assert [summary.values[name] for name in same] == [alone.values[name] for name in same]
    assert (summary.requests, summary.completed, summary.failed) == (34, 30, 4)
    assert summary.outcomes == {"ok": 30, "http_error": 2, "timeout": 1, "cut": 1}
    assert summary.http == {"200": 31, "429": 1, "503": 1}
    assert summary.values["success_share"] == summary.values["goodput_share"] == pytest.approx(30 / 34)
    assert summary.values["output_tokens_per_s"] == alone.values["output_tokens_per_s"]


def test_rates_are_what_happens_inside_the_window() -> None:
    """A request every half second that takes ten seconds: what drains after the last arrival does not count."""
    records = [answered(0.5 * i, ttft=1.0, gaps=[0.1] * 90, prompt=300) for i in range(121)]
    summary = summarise(run_of(records, load=Load(qps=2.0), warmup=20.0))
    assert (summary.window.start, summary.window.end) == (20.0, 60.0)
    assert summary.values["output_tokens_per_s"] == pytest.approx(182, rel=0.01)
    assert summary.values["input_tokens_per_s"] == pytest.approx(600, rel=0.03)
    assert summary.values["total_tokens_per_s"] == pytest.approx(782, rel=0.03)
    assert summary.values["requests_per_s"] == pytest.approx(2, rel=0.03)
    assert summary.values["achieved_qps"] == summary.values["offered_qps"] == pytest.approx(2, rel=0.03)
    assert summary.values["overall_output_tokens_per_s"] == pytest.approx(121 * 91 / 70)
    assert summary.requests == summary.completed == 81
    assert summary.values["in_flight_mean"] == pytest.approx(20, rel=0.01)  # Little: 2 a second, 10 s each
    assert summary.values["in_flight_peak"] == 20
    assert not summary.oversaturated


@pytest.mark.parametrize("streams", [3, 64])
def test_rates_of_a_closed_loop_hardly_depend_on_where_the_window_lies(streams: int) -> None:
    """Streams that all end together, every four seconds: fifteen seconds have three ends in them, or four."""
    found, ends = [], []
    for start in np.random.default_rng(streams).uniform(4.0, 9.0, 20):
        stop = start + 15.0
        records = [answered(4.0 * turn, ttft=1.0, gaps=[0.1] * 30) for turn in range(7) for _ in range(streams)]
        records = [record for record in records if record.intended <= stop]
        run = run_of(records, load=Load(concurrency=streams), warmup=start, duration=stop)
        values = summarise(run).values
        found.append([values[name] for name in ("requests_per_s", "input_tokens_per_s", "output_tokens_per_s")])
        ends.append(sum(start <= record.ended <= stop for record in records) / 15.0)
    assert max(ends) > 1.3 * min(ends)
    assert np.array(found) == pytest.approx(
        np.tile([streams / 4, 50 * streams / 4, 31 * streams / 4], (20, 1)), rel=0.02
    )


def waves_of_an_engine(streams: int, step_tokens: int, seconds: float) -> list[RequestRecord]:
    """A closed loop of 512 tokens in and 128 out on an engine whose steps take 2.4 ms and 21 µs a token, of at most
    `step_tokens`; until the last answer to what was asked within `seconds`."""
    now, waiting, left = 0.0, [0.0] * streams, dict[int, int]()
    sent, ended = list[float](), list[float]()
    while waiting or left:
        let_in = min(len(waiting), (step_tokens - len(left)) // 512)
        now += 2.4e-3 + 21e-6 * (len(left) + 512 * let_in)
        left = {request: tokens - 1 for request, tokens in left.items()}
        for request in [request for request, tokens in left.items() if tokens == 0]:
            del left[request]
            ended[request] = now
            waiting += [now] if now < seconds else []
        for _ in range(let_in):
            left[len(sent)] = 127
            sent.append(waiting.pop(0))
            ended.append(0.0)
    return [answered(start, ttft=end - start, gaps=()) for start, end in zip(sent, ended, strict=True)]


@pytest.mark.parametrize(("streams", "step_tokens"), [(32, 8192), (128, 640), (256, 1280), (256, 8192)])
def test_a_closed_loop_of_an_engine_shows_the_rate_it_keeps_up(streams: int, step_tokens: int) -> None:
    ends = np.array([record.ended for record in waves_of_an_engine(streams, step_tokens, 100.0)])
    kept_up = ((ends > 20) & (ends < 100)).sum() / 80
    for seconds in np.random.default_rng(streams).uniform(15.0, 20.0, 3):
        records = waves_of_an_engine(streams, step_tokens, seconds)
        run = run_of(records, load=Load(concurrency=streams), warmup=3.0, duration=seconds)
        assert summarise(run).values["requests_per_s"] == pytest.approx(kept_up, rel=0.015)


def test_the_peak_in_flight_is_that_of_a_count_at_every_event() -> None:
    rng = np.random.default_rng(5)
    records = [answered(x, ttft=y) for x, y in zip(rng.uniform(0, 20, 300), rng.exponential(1, 300), strict=True)]
    summary = summarise(run_of(records, duration=20.0, warmup=5.0))
    moments = [t for record in records for t in (record.sent or 0.0, 5.0) if 5.0 <= t <= 20.0]
    counts = [sum((r.sent or 0.0) <= t < (r.ended or 0.0) for r in records) for t in moments]
    assert summary.values["in_flight_peak"] == max(counts)
    over_time = in_flight_over_time(columns(records), np.linspace(5, 20, 31))
    assert float(over_time.mean()) == pytest.approx(summary.values["in_flight_mean"])


def test_goodput_is_the_requests_that_keep_every_limit() -> None:
    rng = np.random.default_rng(11)
    records = [answered(0.02 * i, ttft=rng.exponential(0.2), gaps=rng.exponential(0.02, 40)) for i in range(400)]
    summary = summarise(run_of(records), parse_slo(["ttft_p99=300ms,tbt_p90=50ms", "e2e_p50=1.2s", "tpot_p99=25ms"]))
    good = [
        record.times[0] - record.intended <= 0.3
        and np.mean(np.diff(record.times) <= 0.05) >= 0.9
        and record.times[-1] - record.intended <= 1.2
        and (record.times[-1] - record.times[0]) / 40 <= 0.025
        for record in records
    ]
    assert 20 < sum(good) < 380
    assert summary.values["goodput_share"] == pytest.approx(np.mean(good))
    assert summary.values["goodput"] == pytest.approx(sum(good) / summary.window.length)


def test_lengths_counters_and_caches_are_checked() -> None:
    records = [answered(float(i), prompt=100, cached=25, asked=12 if i < 3 else 10) for i in range(10)]
    records[4].counted_by = "tokenizer"
    summary = summarise(run_of(records))
    assert summary.values["cached_share"] == 0.25
    assert summary.values["short_share"] == pytest.approx(0.3)
    assert any("3 of 10 answers are shorter" in note for note in summary.notes)
    assert any("1 answers were counted by the tokenizer" in note for note in summary.notes)


@pytest.mark.parametrize(
    "records",
    [
        [],
        [failed(float(i), Outcome.CONNECT, None) for i in range(5)],
        [RequestRecord(index=0, intended=0.0)],
        [answered(0.0, gaps=[])],
        [answered(0.0) for _ in range(20)],
        [RequestRecord(index=0, intended=0.0, sent=0.0, ended=0.5, outcome=Outcome.OK, status=200)],
        [answered(0.0, tokens=[2**70] * 10, prompt=2**70)],
    ],
    ids=["nothing", "all refused", "cancelled before the send", "one token", "all at once", "empty answer", "nonsense"],
)
@pytest.mark.parametrize("warmup", [0.0, 10.0])
def test_any_run_has_a_summary(records: list[RequestRecord], warmup: float) -> None:
    level = combine([summarise(run_of(records, warmup=warmup), parse_slo(["ttft_p99=1s", "tbt_p50=1s"]))])
    assert set(level.values) == set(FIGURES)
    assert all(figure.value is None or np.isfinite(figure.value) for figure in level.values.values())


def test_an_answer_without_content_is_no_goodput() -> None:
    empty = RequestRecord(index=0, intended=0.0, sent=0.0, ended=0.5, outcome=Outcome.OK, status=200)
    summary = summarise(run_of([empty, answered(1.0)]), parse_slo(["ttft_p99=1s"]))
    assert summary.values["goodput_share"] == 0.5


def test_client_limited_runs_are_never_averaged_in() -> None:
    slow = run_of([answered(float(i), ttft=9.0) for i in range(50)], limited=True, repeat=1)
    fast = [run_of([answered(float(i), ttft=0.1) for i in range(50)], repeat=repeat) for repeat in (0, 2)]
    level = combine([summarise(run) for run in (fast[0], slow, fast[1])])
    assert level.value("ttft_mean") == pytest.approx(0.1)
    assert not level.client_limited
    assert any("1 of 3 runs left out" in note for note in level.notes)
    assert combine([summarise(slow)]).client_limited


def test_repeats_too_short_for_a_percentile_are_pooled() -> None:
    runs = [queue_run(5.0, 0.05, count=120, seed=2, repeat=repeat) for repeat in range(3)]
    level = combine([summarise(run) for run in runs])
    values = np.concatenate([request_metrics(columns(run.requests))["ttft"] for run in runs])
    assert [summary.values["ttft_p99"] for summary in level.runs] == [None] * 3
    assert level.value("ttft_p99") == np.percentile(values, 99, method="inverted_cdf")
    assert level.value("ttft_p99.9") is None
    interval = level.values["ttft_p50"].interval
    assert interval is not None
    assert interval.contains(float(np.mean([np.median(values[i : i + 120]) for i in (0, 120, 240)])))


def test_runs_that_vary_are_flagged() -> None:
    runs = [run_of([answered(float(i), ttft=ttft) for i in range(20)]) for ttft in (0.1, 0.2, 0.3)]
    level = combine([summarise(run) for run in runs])
    assert level.values["ttft_mean"].cv == pytest.approx(0.5)
    assert level.values["ttft_mean"].noisy
    assert not level.values["tbt_mean"].noisy


def large_run_seconds(count: int) -> float:
    rng = np.random.default_rng(0)
    gaps = rng.exponential(0.01, (count, 299))
    tokens = rng.integers(1, 3, (count, 300)).tolist()
    run = run_of([answered(0.01 * i, gaps=gaps[i], tokens=tokens[i]) for i in range(count)])
    began = time.process_time()
    summarise(run, parse_slo(["ttft_p99=1s", "tbt_p99=50ms"]))
    return time.process_time() - began


def test_a_large_run_is_summarised_quickly() -> None:
    assert large_run_seconds(1000) < 1.0


@pytest.mark.slow
def test_a_huge_run_is_summarised_quickly() -> None:
    assert large_run_seconds(10_000) < 4.0
