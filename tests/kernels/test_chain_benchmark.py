"""What `kernels/benchmarks/layer_chain.py` times, and what it makes of its figures; no GPU."""

import argparse
import importlib
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from bladellm_kernels.linear_schedules import Entry, ScheduleTable, WideSchedule
from bladellm_kernels.wide_linear import plan

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("layer_chain")


def options(**given) -> argparse.Namespace:
    usual = {"tokens": [128, 256], "groups": [2, 3], "clusters": [1, 2], "bands": [4, 8], "stream_k": [0, 1]}
    return argparse.Namespace(**usual | {"turns": 3, "seconds": 0.9, "least_gain": 0.5} | given)


@pytest.mark.parametrize("rows", [160, 300, 2048])
def test_all_that_is_timed_can_be_launched(script, rows):
    for shape in importlib.import_module("linear_step").models()["llama-8b"].shapes:
        first, *others = script.choices(shape, rows, options())
        assert first is None
        assert len(others) == len(set(others)) >= 12
        for schedule in others:
            assert plan(rows, shape.outputs, shape.inputs, schedule, 132).grid > 0
            assert schedule.gated == shape.gated


def test_a_table_changes_for_one_number_of_rows_alone(script):
    shape = importlib.import_module("linear_step").Shape("gate-up", 64, 32, gated=True)
    known, other = WideSchedule(128), WideSchedule(192)
    for entries in ((), (Entry(40, None), Entry(2000, known))):
        base = ScheduleTable({(32, 32, True): entries} if entries else {})
        rows = random.randint(100, 1900)
        changed = script.table_with(base, shape, rows, other)
        assert changed.choose(rows, 32, 32, True) == other
        for near in (rows - 1, rows + 1):
            assert changed.choose(near, 32, 32, True) == base.choose(near, 32, 32, True)


@pytest.mark.parametrize(("least", "saves"), [(0.5, True), (30.0, False)])
def test_the_best_is_taken_where_it_saves_enough(script, least, saves, monkeypatch):
    """Seconds of one layer, by graphs that take turns."""
    shape = importlib.import_module("linear_step").Shape("gate-up", 64, 32, gated=True)
    args = options(tokens=[128], groups=[2], clusters=[1], bands=[8], least_gain=least)
    choices = script.choices(shape, 300, args)
    seconds = {None: 5e-3, False: 4e-3, True: 3e-3}

    def captured(table):
        found = table.choose(300, 32, 32, True)
        return seconds[found.stream_k] if found is not None else seconds[None]

    chain = SimpleNamespace(stream=range(300), layers=[1], captured=captured)
    base = ScheduleTable({(32, 32, True): (Entry(300, next(each for each in choices if each is not None)),)})
    monkeypatch.setattr(script, "compile_ahead", lambda sources, name: None)
    monkeypatch.setattr(script, "sustained", lambda graphs, seconds: graphs)
    monkeypatch.setattr(script, "sustained_turns", lambda graphs, seconds, turns: [[each] * turns for each in graphs])
    lines, best = script.measure(chain, shape, base, args)
    table, divided = seconds[False], seconds[True]
    turn = [table, seconds[None], table, divided, table]
    assert [line.split(" | ")[3:5] for line in lines] == [
        [f"{each * 1e6:.1f}", f"{each / table - 1:+.2%}"] for each in turn
    ]
    assert best == (next(each for each in choices if each and each.stream_k) if saves else None)
