"""What `kernels/benchmarks/packed_linear.py` times, and the lines that it makes of it; no GPU."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bladellm_kernels.packed_linear import MAX_ROWS, schedule_for
from bladellm_kernels.packed_weight import TILE

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
LAYERS = {"o": False, "gate-up, silu · mul": True}


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    found = importlib.import_module("packed_linear")
    for name in ("packed_linear", "cluster_linear"):
        monkeypatch.setattr(importlib.import_module(name), "copies", lambda shape: 3)
    return found


def a_problem(script, name: str, rows: int):
    """A small layer, and its packed weights."""
    shape = importlib.import_module("linear_step").Shape(name, 128, 64, gated=LAYERS[name])
    pool = torch.randn(3 * 128 * 64).mul_(2**-6).bfloat16()
    return script.problem_of(shape, rows, pool, False), script.packed_copies(shape, pool)


def test_all_layers_that_are_timed_have_a_schedule(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["packed_linear.py"])
    args = script.arguments()
    assert args.layers == ["qkv", "o", "gate-up, silu · mul", "down"]
    assert {1, MAX_ROWS} <= set(args.rows) <= set(range(1, MAX_ROWS + 1))
    for model in script.models().values():
        for shape in model.shapes:
            assert shape.rows % TILE == shape.inputs % TILE == 0
            assert all(schedule_for(rows, shape.rows, shape.inputs) is not None for rows in args.rows)


@pytest.mark.parametrize("name", LAYERS)
def test_both_ways_are_right_and_wrong_results_are_found(script, name):
    problem, packed = a_problem(script, name, 5)
    ways = script.ways(problem, packed)
    assert [way.name for way in ways] == ["linear", "packed"]
    assert ways[1].bytes == packed[0].bytes < ways[0].bytes == 2 * 128 * 64
    assert all(len(way.operators) == 3 for way in ways)
    assert problem.adds == (name == "o")
    assert [script.fault_of(problem, way) for way in ways] == [None, None]
    nothing = replace(ways[0], operators=[lambda out, residual: None])
    assert script.fault_of(problem, nothing) == "error nan"
    shares = iter((1, 1.01))

    def vary(out, residual):
        out.copy_(problem.expected * next(shares) + (0 if residual is None else residual))

    varying = replace(ways[0], operators=[vary])
    assert script.fault_of(problem, varying) == "other bits each time"


@pytest.mark.parametrize("name", LAYERS)
def test_lines_have_times_and_rates_of_what_each_reads(script, name, monkeypatch):
    problem, packed = a_problem(script, name, 3)
    calls = []

    def replayed(graphs, repeats):
        calls.extend(len(graph) for graph in graphs)
        return [len(graph) * seconds for graph, seconds in zip(graphs, (4e-6, 2e-6), strict=False)]

    monkeypatch.setattr(script, "capture", list)
    monkeypatch.setattr(script, "replayed", replayed)
    sizes = problem.shape.bytes, packed[0].bytes
    shares = [size / us / 1e6 / script.ceiling(size) for size, us in zip(sizes, (4, 2), strict=True)]
    lines = script.measure(problem, packed, 1)
    assert lines == [
        f"| {name} | 3 | linear | 4.00 | 1.00 | {sizes[0] / 4e3:.0f} | {shares[0]:.0%} |",
        f"| {name} | 3 | packed | 2.00 | 2.00 | {sizes[1] / 2e3:.0f} | {shares[1]:.0%} |",
    ]
    assert script.HEADER.splitlines()[0].count("|") == lines[0].count("|")
    assert all(count % 3 == 0 for count in calls)
    assert len(calls) == 2
    problem.expected[1, 2] += 9 * problem.expected.norm()
    wrong = script.measure(problem, packed, 1)
    assert [line.partition("error")[0] for line in wrong] == [
        f"| {name} | 3 | {way} | wrong: " for way in ("linear", "packed")
    ]
    assert {line.count("|") for line in wrong} == {lines[0].count("|")}
    assert len(calls) == 2, "nothing wrong is timed"


def test_weights_that_cannot_be_packed_are_named(script):
    shape = importlib.import_module("linear_step").Shape("o", 64, 64)
    pool = torch.randn(3 * 64 * 64).bfloat16()
    pool[70] = torch.inf
    with pytest.raises(ValueError, match="o: 1 weights of 3 cannot be packed"):
        script.packed_copies(shape, pool)
