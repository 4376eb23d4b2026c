"""What `kernels/benchmarks/cluster_linear.py` times, and the table it makes of it; no GPU."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch
from bladellm_kernels.cluster_linear import plan
from bladellm_kernels.linear_schedules import ClusterSchedule, DotSchedule, Entry, ScheduleTable, default_schedule

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
OPTIONS = argparse.Namespace(clusters=[1, 2, 4], launch_at=[1, 2], space=[227, 112])


@pytest.fixture
def scripts(monkeypatch):
    """The benchmark and its table, on a machine with an H200's multiprocessors."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script, table = importlib.import_module("cluster_linear"), importlib.import_module("cluster_table")
    monkeypatch.setattr(script, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return script, table


def test_a_table_takes_clusters_for_what_was_measured_and_a_little_below(scripts):
    kernel, near, far = (
        DotSchedule(16, 64, 64),
        ClusterSchedule(1, 2, 4, tokens=32),
        ClusterSchedule(1, 2, 4, tokens=64),
    )
    known = [Entry(16, kernel), Entry(17, None), Entry(40, kernel), Entry(48, None), Entry(100, kernel)]
    base = ScheduleTable({(96, 32, False): known})
    table = scripts[1].with_clusters(base, (96, 32, False), {64: far, 32: near, 80: None})
    expected = {16: kernel, 17: None, 23: kernel, 24: near, 32: near, 33: kernel, 40: kernel, 47: None}
    expected |= {48: far, 64: far, 65: kernel, 100: kernel, 101: None}
    assert {rows: table.choose(rows, 96, 32) for rows in expected} == expected
    assert scripts[1].with_clusters(table, (96, 32, False), {64: far, 32: near, 80: None}) == table
    fresh = scripts[1].with_clusters(ScheduleTable(), (96, 32, True), {64: far})
    assert all(fresh.choose(rows, 96, 32, True) == default_schedule(rows) for rows in range(1, 17))
    assert [fresh.choose(rows, 96, 32, True) for rows in (17, 47, 48, 65)] == [None, None, far, None]


@pytest.mark.parametrize("rows", [24, 64, 136, 256])
def test_all_that_is_timed_can_be_launched(scripts, rows):
    step = importlib.import_module("linear_step")
    for shape in step.models()["llama-8b"].shapes:
        if shape.gated or shape.name in ("head", "gate-up"):
            continue
        choices = scripts[0].schedules(shape, rows, OPTIONS)
        assert len(choices) > 2
        for schedule in choices:
            planned = plan(rows, shape.outputs, schedule)
            assert planned.grid >= 66
            assert schedule.tokens == rows
            assert scripts[0].described(schedule, shape, rows)


@pytest.mark.parametrize(("name", "gated"), [("o", False), ("gate-up", True)])
def test_wrong_results_are_found(scripts, name, gated, monkeypatch):
    script = scripts[0]
    shape = importlib.import_module("linear_step").Shape(name, 64, 32, gated=gated)
    monkeypatch.setattr(script, "copies", lambda shape: 3)
    problem = script.problem_of(shape, 5, torch.randn(3 * 64 * 32).mul_(2**-6), False)
    expected = problem.expected.clone()

    def launch(x, weight, out, residual, schedule) -> bool:
        out.copy_(expected if residual is None else expected + residual)
        return True

    monkeypatch.setattr(script, "launch_cluster_linear", launch)
    assert script.fault_of(problem, ClusterSchedule(1, 1, 2)) is None
    script.by_linear(problem, problem.weights[0])
    expected[3, 2] += 9 * expected.norm()
    assert script.fault_of(problem, ClusterSchedule(1, 1, 2)).startswith("error")
