"""The bench measured with mocks of exact timing: does it report what is there?

Every test that measures times has the machine to itself among these (fixture `alone`) and repeats a level that came out
wrong where the bench or the mock itself says that it was disturbed. Tolerances are those of the specification.
"""

import numpy as np
import pytest

from bladellm_tools.bench.args import LevelArgs, MockArgs
from bladellm_tools.bench.columns import columns, samples
from bladellm_tools.bench.records import LevelRun, Outcome
from bladellm_tools.bench.stats import Samples
from tests.bench.driving import closed, drive, drive_together, open_loop, undisturbed

pytestmark = [pytest.mark.usefixtures("alone"), pytest.mark.timeout(300)]
"""The time-out counts waiting for the machine."""


def measured(run: LevelRun) -> dict[str, Samples]:
    """The values of every metric; all requests must have been answered."""
    assert {record.outcome for record in run.requests} == {Outcome.OK}, run.aborted
    table = columns(run.requests)
    return samples(table, table.ok)


def assert_exact(found: Samples, exact: float) -> None:
    """The median within 2 %, p99 within 5 %."""
    assert found.percentile(0.5) == pytest.approx(exact, rel=0.02)
    assert found.percentile(0.99) == pytest.approx(exact, rel=0.05)


@pytest.mark.turns("benchmarks")
@pytest.mark.parametrize(
    ("streams", "requests", "tbt", "tokens"),
    [pytest.param(1, 8, 0.01, 50, marks=pytest.mark.slow), (64, 128, 0.01, 50)],
)
def test_times_come_out_as_they_are(streams: int, requests: int, tbt: float, tokens: int) -> None:
    def check(run: LevelRun) -> None:
        found = measured(run)
        assert_exact(found["ttft"], 0.15)
        assert_exact(found["tbt"], tbt)

    run = undisturbed(check, MockArgs(ttft=0.15, tbt=tbt), *closed(streams, requests), tokens)
    assert all(record.tokens == [1] * tokens for record in run.requests)
    assert all(record.completion_tokens == record.asked_tokens == tokens for record in run.requests)


@pytest.mark.turns("benchmarks")
def test_512_streams_of_20_tokens_a_second_are_no_burden() -> None:
    def check(run: LevelRun) -> None:
        found = measured(run)
        assert_exact(found["ttft"], 0.15)
        assert_exact(found["tbt"], 0.05)
        assert not run.client.limited
        assert run.client.schedule_lag_p99 < 0.001
        assert run.client.headroom > 2

    undisturbed(check, MockArgs(ttft=0.15, tbt=0.05), *closed(512, 512), 60)


@pytest.mark.turns("benchmarks")
def test_a_freeze_shows_in_scheduled_times_and_hides_in_service_times() -> None:
    """Coordinated omission: one request of a closed loop meets the freeze, the others are not even sent."""
    mock = MockArgs(ttft=0.008, tbt=0.002, freeze_every=3, freeze_for=0.4)
    open_run, closed_run, capped_run = drive_together(
        mock,
        [
            open_loop(50, arrival="constant", duration=3.5, min_requests=1),
            (closed(1, 1)[0], LevelArgs(arrival="closed", duration=3.5, min_requests=1, warmup=0)),
            open_loop(50, arrival="constant", duration=3.5, min_requests=1, max_inflight=1),
        ],
        tokens=2,
    )
    assert 0.3 < measured(open_run)["e2e"].percentile(0.99) < 0.45
    assert measured(closed_run)["e2e"].percentile(0.99) < 0.05
    assert max(record.ended - record.sent for record in closed_run.requests) > 0.35
    # A cap on requests in flight hides the freeze from service times alike, but not from the intended times.
    capped = measured(capped_run)
    assert capped["e2e_service"].percentile(0.99) < 0.05
    assert capped["e2e"].percentile(0.99) > 0.3
    assert capped_run.client.limited
    assert capped_run.client.schedule_lag_p99 > 0.3


@pytest.mark.parametrize("api", [pytest.param("completions", marks=pytest.mark.slow), "chat"])
def test_merged_chunks_do_not_change_the_time_a_token(api: str) -> None:
    def check(run: LevelRun) -> None:
        found = measured(run)
        # In a chat, an empty role chunk comes long before the first token.
        assert_exact(found["ttft"], 0.15)
        assert_exact(found["tbt"], 0.01)
        assert_exact(found["chunk_gap"], 0.04)

    run = undisturbed(check, MockArgs(ttft=0.15, tbt=0.01, tokens_per_chunk=4), *closed(8, 16), 40, api=api)
    assert all(record.tokens == [4] * 10 for record in run.requests)


@pytest.mark.slow
def test_the_mean_wait_of_a_queue_is_that_of_theory() -> None:
    """M/D/1 at load 0.7: the mean wait is rho D / (2 (1 - rho)) (Pollaczek and Khinchine)."""
    service, load = 0.01, 0.7
    mock = MockArgs(ttft=service, tbt=0.001, service_time=service)
    run = drive(mock, *open_loop(load / service, duration=12, warmup=1, min_requests=1), tokens=1, seed=3)
    table = columns(run.requests)
    ttft = samples(table, table.ok & (table.intended >= run.warmup))["ttft"]
    interval = ttft.mean_interval()
    assert interval is not None
    assert interval.contains(load * service / (2 * (1 - load)) + service)
    assert interval.high - interval.low < 0.01
    assert float(np.mean(table.first - table.intended)) == pytest.approx(queue_ttft(table.intended, service), rel=0.1)


def queue_ttft(arrivals: np.ndarray, service: float) -> float:
    """The mean time to the first token of these very arrivals (Lindley's recursion)."""
    free, total = 0.0, 0.0
    for arrival in arrivals:
        free = max(free, arrival) + service
        total += free - arrival
    return total / len(arrivals)
