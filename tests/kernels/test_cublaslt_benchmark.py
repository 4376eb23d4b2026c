"""What `kernels/benchmarks/cublaslt.py` makes of its figures, and which algorithms it refuses; no GPU."""

import importlib
from pathlib import Path

import pytest
import torch
from bladellm_kernels.cublaslt_product import product_of
from bladellm_kernels.linear import linear_reference
from bladellm_kernels.linear_schedules import DotSchedule, Entry, ScheduleTable, default_schedule

from tests.kernels.cublaslt_support import FakeCublasLt, FakeLibrary, FakeProduct, algorithm, matrices, schedule_of


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "kernels" / "benchmarks"))
    return importlib.import_module("cublaslt_table")


def test_a_measured_table_takes_what_is_faster_and_reaches_a_little_below(script):
    shape = importlib.import_module("linear_step").Shape("o", 96, 32)
    kernel, first, second = DotSchedule(64, 64, 64), schedule_of(1), schedule_of(2)
    base = ScheduleTable({(96, 32, False): [Entry(16, kernel), Entry(64, kernel), Entry(128, None)]})
    figures = [(32, {first: 9.0, second: 8.0}), (64, {first: 9.95, kernel: 10.0}), (100, {first: 8.0, kernel: 7.0})]
    choices = [script.Choice(shape, rows, 10.0, 9.0, times, {second: "two"}) for rows, times in figures]
    table = script.merged(base, choices)
    expected = {16: kernel, 17: None, 23: None, 24: second, 32: second, 33: None, 64: None, 65: kernel, 128: None}
    assert {rows: table.choose(rows, 96, 32) for rows in expected} == expected
    assert choices[0].line == "| 32 | o | 10.00 | 9.00 | 8.00 | 20.0 | 0 | two |"
    assert script.step_lines(choices, 10).splitlines()[2] == "| 32 | o | 0.100 | 0.080 | 20.0 |"


def test_a_table_keeps_algorithms_of_rows_between_those_measured(script):
    """What was measured before, and no gap but where neither algorithm reaches."""
    shape, before = importlib.import_module("linear_step").Shape("o", 96, 32), [schedule_of(n) for n in range(3)]
    rows = (320, 448, 2048)
    base = script.merged(ScheduleTable(), [script.Choice(shape, *at, {}) for at in algorithms(rows, before)])
    newer = [schedule_of(n) for n in (7, 8, 9)]
    choices = [script.Choice(shape, *at, {}) for at in algorithms((256, 1600, 2048), newer)]
    table = script.merged(base, choices)
    expected = {256: newer[0], 257: before[0], 448: before[1], 449: None, 1199: None, 1200: newer[1]}
    expected |= {1600: newer[1], 1601: newer[2], 2048: newer[2], 2049: None}
    assert {rows: table.choose(rows, 96, 32) for rows in expected} == expected
    assert script.merged(table, choices) == table


def algorithms(rows, schedules):
    return [(m, 10.0, 9.0, {schedule: 8.0}) for m, schedule in zip(rows, schedules, strict=True)]


def test_a_shape_that_is_new_in_a_table_keeps_the_rule_below_what_was_measured(script):
    """The table stands in for the rule once it has the shape."""
    choice = script.Choice(importlib.import_module("linear_step").Shape("qkv", 4608, 3584), 32, 20.0, 20.0, {}, {})
    table = script.merged(ScheduleTable(), [choice])
    for rows in range(1, 33):
        assert table.choose(rows, 4608, 3584) == default_schedule(rows)


def test_layers_with_adapters_behind_them_begin_with_the_schedules_of_their_weights(script):
    kernel, shape = DotSchedule(64, 64, 64), importlib.import_module("linear_step").Shape
    base = ScheduleTable({(90, 32, False): [Entry(16, kernel)]})
    shapes = [shape("qkv", 90, 32, bias=True), shape("o", 32, 32), shape("head", 70, 32)]
    found, table = importlib.import_module("cublaslt").stacked(shapes, 4, 3, base)
    assert found == [shape("qkv", 128, 32), shape("o", 48, 32)]
    assert table.choose(9, 128, 32) == table.choose(9, 90, 32) == kernel


def test_screening_refuses_what_is_wrong(script, monkeypatch):
    """Algorithm 2 adds what its workspace holds, 3 does not run; 4 was best of other rows, 5 is beside it."""
    tries = importlib.import_module("cublaslt_candidates")
    times = {1: 4.0, 4: 2.0, 5: 1.0}
    lt = FakeCublasLt(FakeLibrary(statuses={3: 15}, wrong=(2,)))
    x, weight, _, out = matrices(5, 48, 64, torch.bfloat16)
    shape = importlib.import_module("linear_step").Shape("o", 48, 64)
    problem = tries.Problem(shape, x, [weight], None, out, False, linear_reference(x, weight).float())
    products = [product_of(x, weight, None, None, out, by_rows) for by_rows in (False, True)]
    fakes = [FakeProduct(lt, product, (1, 2, 3)) for product in products]
    monkeypatch.setattr(FakeProduct, "runs", lambda self, found: found.data[0] < 9)
    monkeypatch.setattr(tries.Problem, "prepared", lambda self, lt, by_rows: fakes[by_rows])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: type("Stream", (), {"cuda_stream": 0}))
    monkeypatch.setattr(tries, "graph_of", lambda problem, work, seconds: (work.args[1].data[0], 1))
    monkeypatch.setattr(tries, "replayed", lambda graphs, repeats: [times[number] for number in graphs])
    monkeypatch.setattr(tries, "neighbours", lambda prepared, best: [algorithm(5)] if best.data[0] == 4 else [])
    screening = tries.Screening(problem, lt, 60.0)
    assert [each.algorithm.data[0] for each in screening.run(False, [schedule_of(4), schedule_of(9)])] == [5, 4, 1]
    assert screening.first.algorithm.data[0] == 1
    assert screening.tried == 5
    assert screening.refused == {"less close to float32 than torch": 1, "cublasLtMatmul: 15": 1}
