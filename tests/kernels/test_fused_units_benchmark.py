"""The benchmark of fused unit layers computes one step apart and fused, and its candidates compile for a Hopper."""

import dataclasses
import importlib
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from bladellm_kernels.unit_schedules import GATED_SCHEDULES, Gemv, Ring, Streamed, unit_schedule
from bladellm_kernels.weight_units import pack_units

from tests.kernels.hopper import compiled_launches
from tests.kernels.test_ragged_decode_triton import resources
from tests.kernels.test_unit_linear import layer
from tests.kernels.units_in_python import run_units_in_python
from tests.support.cases import drawn_of

SCRIPTS = Path(__file__).parents[2] / "kernels" / "benchmarks"
pytest.importorskip("triton")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("fused_units")


@pytest.mark.parametrize("numbers", drawn_of([(4, 32, True), (8, 0, False)], 1), ids=str)
def test_both_chains_are_the_same_step(script, numbers, monkeypatch):
    """numbers: bits, weights of a group, and whether there are zero points."""
    from fused_chain import Sizes, reference

    run_units_in_python(monkeypatch, True)
    weights = script.random_weights(Sizes(2, 4, 2, 16, 128, 90), *numbers, torch.float32, "cpu")
    x = torch.randn(3, 64)
    expected = reference(weights.dense, x, partial(script.queries_only, hidden=64))
    default = script.default_schedules(3, weights.units)
    found = script.apart(weights, x, 2), script.fused(weights, x, 2, default)
    others = {"middle": Gemv(16, 2, 1), "small": Streamed(16, 4, 1, 2), "gated": None, "wide": Gemv(32, 4, 1)}
    found += (script.apart(weights, x, 2, others),)
    for logits in found:
        torch.testing.assert_close(logits.double(), expected, rtol=1e-3, atol=1e-3)
    # Codes of 4 bits are multiplied with 128 added, which grows float32's rounding: up to 4e-5 of the logits in 400
    # draws. A mark where two runs differ is no number.
    assert float(script.error(weights, script.apart, x)) <= 1e-4


def test_candidates_of_steps_apart_are_the_runtimes_and_those_given(script):
    search = importlib.import_module("apart_units")
    found = list(search.candidates(["long=gemv:16,4,4 stream:16,8,2,1", "gated=none ring:64,8,2,3,1,1,1,1,2"]))
    assert [kind for kind, _ in found] == ["long", "long", "gated", "gated"]
    assert found[2][1] is None
    assert found[3][1] == Ring(64, 8, 2, 3, 1, 1, 1, fold=1, ahead=2)
    table = search.table_schedules(40, fine=False)
    assert table == {
        "middle": unit_schedule(40, 6144, 4096), "small": unit_schedule(40, 4096, 4096),
        "wide": unit_schedule(40, 28672, 4096), "gated": GATED_SCHEDULES[64], "long": unit_schedule(40, 4096, 14336),
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [8, 16])
def test_candidates_fit_a_multiprocessor(script, tokens, monkeypatch):
    from bladellm_kernels import unit_call
    from bladellm_kernels.delayed_norm import DelayedNorm
    from bladellm_kernels.normed_unit_linear import normed_unit_linear, unit_linear_add

    shape = unit_call.unit_shape
    monkeypatch.setattr(unit_call, "unit_shape", lambda *given: dataclasses.replace(shape(*given), plain=False))
    for kind, schedule in script.candidates(tokens, []):
        name = next(name for name, its in script.KINDS.items() if its == kind)
        inputs = script.LLAMA_8B.shapes[name][1]
        weight = pack_units(*layer(256, inputs, inputs // 128, 4, False), 4)
        x = torch.zeros(tokens, inputs).bfloat16()
        with compiled_launches() as compiled:
            if kind in ("small", "long"):
                unit_linear_add(x, weight, x.new_zeros(tokens, 256), x.new_zeros(256), 1e-5, schedule=schedule)
            else:
                norm = DelayedNorm(x, torch.zeros(tokens, 128), 1e-5)
                normed_unit_linear(norm, weight, gated=kind == "wide", schedule=schedule)
        (kernel,) = compiled.values()
        programs = 1 if isinstance(schedule, Ring) else max(1, schedule.programs_per_sm)
        assert (kernel.metadata.shared + 1024) * programs <= 228 * 1024, schedule
        if isinstance(schedule, Ring):  # its groups of warps have registers of their own
            continue
        registers, _ = resources(kernel, Path(tempfile.mkdtemp()))
        assert registers * 32 * kernel.metadata.num_warps * programs <= 65536, schedule
