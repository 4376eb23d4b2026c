"""The benchmark of linear layers counts what it says, and what it tries fits a Hopper multiprocessor."""

import importlib
from pathlib import Path

import pytest
from bladellm_kernels.linear_schedules import GEMV_ROWS, Entry, GemvSchedule

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
SHARED_BYTES = 227 * 1024
pytest.importorskip("triton")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("linear")


def test_a_step_has_the_bytes_of_the_models_weights(script):
    parameters = 8_030_261_248  # Of Llama-3.1-8B, norms among them; its embedding is not read by linear layers.
    norms, embedding = 65 * 4096, 128256 * 4096
    assert script.models()["llama-8b"].bytes == 2 * (parameters - norms - embedding)


def test_the_ceiling_goes_through_what_was_measured(script):
    for size, rate in script.CEILINGS:
        assert script.ceiling(size) == pytest.approx(rate)
    rates = [script.ceiling(size * 10**6) for size in range(1, 1200, 7)]
    assert rates == sorted(rates)


def test_candidates_are_few_and_hold_their_rows(script):
    for rows in script.ROWS:
        for gated in (False, True):
            found = script.candidates(rows, gated)
            assert len(found) <= 12
            assert len(set(found)) == len(found)
            assert found == [each for kind in script.KINDS for each in script.candidates(rows, gated, [kind])]
            assert all(rows <= (GEMV_ROWS if isinstance(each, GemvSchedule) else each.block_m) for each in found)


def test_the_table_takes_the_faster_one(script):
    shape, gemv = script.models()["llama-8b"].shapes[0], GemvSchedule(4, 512)
    results = [
        script.Result(shape, rows, 5.0, us, str(gemv), Entry(rows, schedule), {}, {})
        for rows, us, schedule in ((8, 6.0, None), (1, 4.0, gemv))
    ]
    table = script.table_of(results)
    assert table.choose(1, shape.outputs, shape.inputs) == gemv
    assert table.choose(2, shape.outputs, shape.inputs) is None


@pytest.mark.slow
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64, 128, 256])
def test_candidates_compile_for_hopper(script, monkeypatch, rows, gated):
    from tests.kernels.linear_support import compiled_for_hopper
    from tests.kernels.test_kv_rotary_write import spilled

    for schedule in script.candidates(rows, gated):
        with monkeypatch.context() as patch:
            compiled = compiled_for_hopper(patch, (rows, 2048, 4096), schedule, 1 + gated)
        programs = getattr(schedule, "programs", 1) or 1
        assert compiled.metadata.shared * programs <= SHARED_BYTES, schedule
        assert spilled(compiled.asm["ptx"]) <= 64, schedule
