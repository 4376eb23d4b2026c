"""The benchmark of fused layers computes the same step in all its variants, and what it tries fits a multiprocessor."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from bladellm_kernels.linear_schedules import Entry, HopperSchedule, ScheduleTable

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
SHARED_BYTES = 227 * 1024
pytest.importorskip("triton")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("fused_layer")


def test_all_chains_are_the_same_step(script):
    from fused_chain import Sizes, random_attention, random_weights, reference

    sizes = Sizes(3, 4, 2, 16, 96, 130)
    weights = random_weights(sizes, "cpu", torch.float32)
    attention = random_attention(sizes, 5, 70, "cpu", torch.float32)
    for mix in (partial(script.queries_only, hidden=sizes.hidden), lambda qkv, layer: attention(qkv.float(), layer)):
        x = torch.randn(5, sizes.hidden)
        expected = reference(weights, x, lambda qkv, layer, mix=mix: mix(qkv, layer).double())
        for variant in {**script.VARIANTS, **script.APART}.values():
            torch.testing.assert_close(variant.chain(weights, x, mix=mix).double(), expected, rtol=1e-3, atol=1e-3)


def test_the_step_has_the_bytes_of_the_model(script):
    parameters = 8_030_261_248  # Of Llama-3.1-8B, norms among them; its embedding is not read by linear layers.
    assert script.LLAMA_8B.bytes == 2 * (parameters - 65 * 4096 - 128256 * 4096)


def test_projections_without_a_gate_take_the_same_tiles(script):
    gated, plain = HopperSchedule(8, 64, 128), HopperSchedule(8, 128, 64)
    table = ScheduleTable({(50, 16, True): [Entry(8, gated)], (20, 16, False): [Entry(8, plain)]})
    wide = script.without_gates(table)
    assert wide.choose(8, 100, 16) == HopperSchedule(8, 128, 128)
    assert wide.choose(8, 20, 16) == plain
    assert script.changed(table, {"late": 4}).choose(8, 20, 16).late == 4
    assert script.changed(ScheduleTable(norm_rows=(1, 24)), {"late": 4}).norm_rows == (1, 24)


def test_light_schedules_are_a_table_with_those_of_the_operator(script):
    from bladellm_kernels.decode_schedule import LIGHT_SCHEDULE
    from fused_light import light_schedules, light_table

    schedules = light_schedules()
    assert LIGHT_SCHEDULE in schedules.values()
    assert all((each.stages - 1) * each.block_kv * 512 < SHARED_BYTES // 2 for each in schedules.values())
    lines = list(light_table({name: index for index, name in enumerate(schedules)}))
    figures = [float(cell) for line in lines[2:] for cell in line.strip("| ").split(" | ")[1:]]
    assert figures == list(range(len(schedules)))
    assert list(light_table({"64-4-4+3": 4.2}))[2:] == ["| 64-4-4 |  |  | 4.200 |  |  |"]


def test_one_layer_by_the_kernel_for_hopper(script):
    table = script.one_layer_table(script.LLAMA_8B, "gate_up")
    assert table.choose(33, 28672, 4096) == HopperSchedule(64, 128, 64, stages=4)
    assert table.choose(2, 4096, 14336) is None
    assert table.choose(65, 28672, 4096) is None


def test_gaps_between_kernels_are_medians_of_pairs(script):
    from kernel_gaps import REPLAYS, gap_table

    spans, now = [], 0.0
    for layer in range(3 * REPLAYS):
        for name, micros, gap in (("norm", 1.0 + layer, -0.25), ("linear", 100.0 + layer, 2.0)):
            spans.append((name, now, now + micros))
            now += micros + gap
    first, second = list(gap_table(spans[::-1]))[1:]
    # The last kernel of all has none behind it.
    assert first == "| norm | linear | 3 | 5.00 | -0.25 |" or second == "| norm | linear | 3 | 5.00 | -0.25 |"
    assert "| linear | norm | 3 | 103.50 | 2.00 |" in (first, second)
    assert list(gap_table(spans[: 2 * REPLAYS]))[1:] == []


def test_one_tile_for_all_layers(script):
    table = script.tile_table([1, 32], 256, 64, 1, 3, 8)
    assert table.choose_with_norms(1, 4096, 14336) == HopperSchedule(8, 256, 64, 1, 3, 8)
    assert table.choose_with_norms(24, 14336, 4096, gated=True) == HopperSchedule(32, 128, 64, 1, 3, 8)
    assert table.choose_with_norms(33, 4096, 4096) is None


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_candidates_compile_for_hopper(script, monkeypatch, rows):
    from tests.kernels.linear_support import compiled_for_hopper

    for gated, norms in ((False, ["front"]), (False, ["behind"]), (True, ["front"])):
        for schedule in script.norm_candidates(rows, gated):
            with monkeypatch.context() as patch:
                compiled = compiled_for_hopper(patch, (rows, 2048, 4096), schedule, 1 + gated, norms=norms)
            assert compiled.metadata.shared * max(1, schedule.programs) <= SHARED_BYTES, schedule
