"""What `kernels/benchmarks/wide_linear.py` times; no GPU."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch
from bladellm_kernels.wide_linear import plan

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
OPTIONS = argparse.Namespace(
    clusters=[1, 2], groups=[1, 2, 3], bands=[4, 8], stream_k=[0, 1], repeats=1, seconds=0.1, show=2
)


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("wide_linear")


@pytest.mark.parametrize("rows", [160, 288, 576, 1024, 8192])
def test_all_that_is_timed_can_be_launched(script, rows):
    for shape in importlib.import_module("linear_step").models()["llama-8b"].shapes:
        choices = script.schedules(shape, rows, OPTIONS)
        assert len(choices) > 8
        assert {schedule.stream_k for schedule in choices} == {False, True}
        for schedule in choices:
            assert plan(rows, shape.outputs, shape.inputs, schedule, 132).grid > 0
            assert schedule.gated == shape.gated
            assert script.described(schedule)


@pytest.mark.parametrize(("rows", "best"), [(5, 3), (1025, 2)])
def test_the_fastest_are_shown_and_wrong_ones_named(script, rows, best, monkeypatch):
    """Kernels that only copy what is right, one of them a wrong figure; of few rows bursts count."""
    shape = importlib.import_module("linear_step").Shape("gate-up", 64, 32, gated=True)
    problem = script.problem_of(shape, rows, torch.randn(12 * 64 * 32 * 2000).mul_(2**-6), True)
    choices = script.schedules(shape, 512, OPTIONS)[:4]

    def wide(problem, schedule, weight) -> None:
        problem.out.copy_(problem.expected)
        if schedule is choices[1]:
            problem.out[3, 2] += 9 * problem.expected.norm()

    monkeypatch.setattr(script, "by_wide", wide)
    monkeypatch.setattr(script, "compile_ahead", lambda sources, name: None)
    monkeypatch.setattr(script, "graph_of", lambda problem, work, seconds: (None, 10))
    monkeypatch.setattr(script, "replayed", lambda graphs, repeats: [5e-3, 4e-3, 2e-3, 1e-3])
    monkeypatch.setattr(script, "after_pauses", lambda graphs, repeats, pause: [6e-3, 2e-3, 3e-3])
    monkeypatch.setattr(script, "sustained", lambda graphs, seconds: [7e-3, 5e-3, 4e-3])
    lines, chosen = script.measure(problem, choices, OPTIONS)
    assert lines[0].startswith(f"| {rows} | gate-up | {script.described(choices[1])} | wrong: error")
    names = "linear", script.described(choices[3]), script.described(choices[2])
    times = "500.0 | 600.0 | 700.0", "100.0 | 200.0 | 500.0", "200.0 | 300.0 | 400.0"
    expected = [f"| {rows} | gate-up | {name} | {each} |" for name, each in zip(names, times, strict=True)]
    assert [line.rsplit(" ", 2)[0] for line in lines[1:]] == expected
    assert chosen is choices[best]
    monkeypatch.setattr(script, "after_pauses", lambda graphs, repeats, pause: [1.99e-3, 2e-3, 3e-3])
    monkeypatch.setattr(script, "sustained", lambda graphs, seconds: [4e-3, 5e-3, 4e-3])
    assert script.measure(problem, choices, OPTIONS)[1] is None
