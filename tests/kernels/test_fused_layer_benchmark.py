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
        for variant in script.VARIANTS.values():
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


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 16, 32, 64, 128])
def test_candidates_compile_for_hopper(script, monkeypatch, rows):
    from tests.kernels.linear_support import compiled_for_hopper

    for gated, norms in ((False, ["front"]), (False, ["behind"]), (True, ["front"])):
        for schedule in script.norm_candidates(rows, gated):
            with monkeypatch.context() as patch:
                compiled = compiled_for_hopper(patch, (rows, 2048, 4096), schedule, 1 + gated, norms=norms)
            assert compiled.metadata.shared * max(1, schedule.programs) <= SHARED_BYTES, schedule
