"""Readings and counts of several front ends, added up; and what stays of one that was started again."""

import itertools
import random

import pytest

from bladellm_runtime.server.metrics import Metrics
from bladellm_runtime.server.shared_counts import SharedCounts
from bladellm_runtime.server.shared_readings import SharedReadings
from bladellm_runtime.wire.messages import EngineStats


def counted(values: list[float], reasons: list[str], seconds: float) -> tuple[Metrics, EngineStats]:
    """A front end that saw these latencies and reasons; its last step was `seconds` after the engine's start."""
    metrics = Metrics()
    for value in values:
        metrics.latency.observe(value)
    metrics.finished.update(reasons)
    metrics.disconnects = len(reasons)
    return metrics, EngineStats(time=seconds, steps=int(1000 * seconds))


def test_every_front_end_finds_the_same_totals_as_one_that_saw_everything(tmp_path):
    source = random.Random(5)
    values = [[source.expovariate(0.3) for _ in range(source.randrange(200))] for _ in range(3)]
    reasons = [source.choices(["stop", "length", "abort"], k=count) for count in (9, 0, 4)]
    fronts = [counted(*item) for item in zip(values, reasons, (3.0, 5.0, 4.0), strict=True)]
    shared = [SharedReadings(tmp_path, number, 3) for number in range(3)]
    for one, (metrics, stats) in zip(shared, fronts, strict=True):
        one.publish(metrics.reading(stats))
    everything, stats = counted(list(itertools.chain(*values)), list(itertools.chain(*reasons)), 5.0)
    expected = everything.reading(stats)
    for one, (metrics, stats) in zip(shared, fronts, strict=True):
        total = one.total(metrics.reading(stats))
        assert (total.stats, total.finished, total.disconnects) == (expected.stats, expected.finished, 13)
        assert total.histograms.keys() == expected.histograms.keys()
        for name, histogram in total.histograms.items():
            assert histogram.counts == expected.histograms[name].counts
            assert histogram.sum == pytest.approx(expected.histograms[name].sum)


def test_a_front_end_that_is_started_again_goes_on_where_it_was(tmp_path):
    first = SharedReadings(tmp_path, 0, 2)
    old, stats = counted([1.0, 2.0], ["stop"], 1.0)
    SharedReadings(tmp_path, 1, 2).publish(old.reading(stats))
    again = SharedReadings(tmp_path, 1, 2)
    nothing = Metrics().reading(EngineStats())
    assert first.total(nothing).finished == {"stop": 1}, "nobody has taken its place yet"
    new, stats = counted([4.0], ["stop", "abort"], 2.0)
    for _ in range(3):
        again.publish(new.reading(stats))
        total = first.total(nothing)
        assert total.finished == {"stop": 2, "abort": 1}
        assert total.histograms[new.latency.name].sum == 7.0


def test_steps_are_counted_by_one_front_end_only():
    counting, other = Metrics(), Metrics(count_steps=False)
    for metrics in (counting, other):
        metrics.on_step(EngineStats(steps=2, generated_tokens=6))
    assert sum(counting.step_tokens.reading().counts) == 2
    assert sum(other.step_tokens.reading().counts) == 0


def test_counts_are_shared_and_those_of_a_dead_front_end_forgotten(tmp_path):
    first = SharedCounts.create(tmp_path / "counts", 3)
    second, third = (SharedCounts(tmp_path / "counts", number, 3) for number in (1, 2))
    first.connections.add(4)
    second.connections.add(7)
    second.connections.add(-2)
    third.open_requests.add(11)
    for counts in (first, second, third):
        assert (counts.connections.total, counts.open_requests.total) == (9, 11)
    assert (first.connections.own, second.connections.own, third.connections.own) == (4, 5, 0)
    assert (first.connections.excess, second.connections.excess, third.connections.excess) == (4, 5, 0)
    first.forget(1)
    assert (third.connections.total, third.open_requests.total) == (4, 11)
    first.forget(2)
    assert (first.connections.total, first.open_requests.total) == (4, 0)
