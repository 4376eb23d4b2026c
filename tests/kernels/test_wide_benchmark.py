"""What `kernels/benchmarks/wide_linear.py` times; no GPU."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch
from bladellm_kernels.wide_linear import plan

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
OPTIONS = argparse.Namespace(
    clusters=[1, 2], tokens=[128, 192, 256], groups=[1, 2, 3], bands=[4, 8], repeats=1, seconds=0.1, show=2
)


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("wide_linear")


def test_all_that_is_timed_can_be_launched(script):
    choices = script.schedules(OPTIONS)
    assert len(choices) == 32
    for schedule in choices:
        assert plan(8192, 14336, schedule, 132).grid == 132
        assert script.described(schedule)
    assert script.gate_up("llama-8b").outputs == 14336


def test_the_fastest_are_shown_and_wrong_ones_named(script, monkeypatch):
    """Kernels that only copy what is right, one of them a wrong figure."""
    shape = importlib.import_module("linear_step").Shape("gate-up", 64, 32, gated=True)
    problem = script.problem_of(shape, 5, torch.randn(12 * 64 * 32 * 2000).mul_(2**-6), True)
    choices = script.schedules(OPTIONS)[:4]

    def wide(problem, schedule, weight) -> None:
        problem.out.copy_(problem.expected)
        if schedule is choices[1]:
            problem.out[3, 2] += 9 * problem.expected.norm()

    monkeypatch.setattr(script, "by_wide", wide)
    monkeypatch.setattr(script, "by_many_rows", lambda problem, weight: problem.out.copy_(problem.expected))
    monkeypatch.setattr(script, "graph_of", lambda problem, work, seconds: (None, 10))
    monkeypatch.setattr(script, "replayed", lambda graphs, repeats: [1e-3] * len(graphs))
    monkeypatch.setattr(script, "sustained", lambda graphs, seconds: [5e-3, 4e-3, 3e-3, 1e-3, 2e-3])
    lines = script.measure(problem, choices, OPTIONS)
    assert lines[0].startswith(f"| 5 | {script.described(choices[1])} | wrong: error")
    assert [line.split(" | ")[1] for line in lines[1:]] == [
        *("linear", "many rows", script.described(choices[2]), script.described(choices[3]))
    ]
    assert [line.split(" | ")[3] for line in lines[1:]] == ["500.0", "400.0", "100.0", "200.0"]
