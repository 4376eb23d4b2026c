"""Gate-up projections of unit weights that apply the gate: run in Python, compiled, and on a GPU."""

import dataclasses
from functools import partial

import pytest
import torch
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.unit_schedules import GATED_SCHEDULES, Ring, gated_schedule
from bladellm_kernels.weight_units import pack_units

from tests.kernels.hopper import compiled_launches
from tests.kernels.sass import spills_in_the_loop
from tests.kernels.test_normed_unit_linear import assert_rounded
from tests.kernels.test_unit_linear import MIDDLE, layer
from tests.kernels.units_in_python import run_units_in_python
from tests.support.cases import some_pairs

pytest.importorskip("triton")

CASES = [
    (4, 256, 512, 4, True, 21, Ring(64, 32, 2, 2, splits=1)),
    (4, 640, 1155, 1, False, 9, Ring(64, 16, 2, 3, steps=1)),
    (4, 384, 640, 5, False, 35, Ring(64, 16, 2, 2, steps=1, splits=1)),
    (8, 128, 320, 5, False, 18, Ring(64, 32, 2, 2, splits=1)),
]


def check(bits, rows, columns, groups, zeros, tokens, schedule, prepare=lambda x: None, device="cpu") -> None:
    """Against float64, into a poisoned part of a larger output."""
    from bladellm_kernels.unit_linear import unit_linear_silu_mul

    codes, scales, points = layer(rows, columns, groups, bits, zeros, device)
    weight = pack_units(codes, scales, points, bits)
    bias = torch.randn(rows, device=device).bfloat16() if zeros else None
    x = torch.randn(tokens, columns, device=device).bfloat16()
    gate, up = reference_linear(x, codes, scales, points, MIDDLE[bits], bias).chunk(2, dim=1)
    whole = torch.full((tokens + 1, rows // 2 + 5), torch.nan, device=device).bfloat16()
    prepare(x)
    y = unit_linear_silu_mul(x, weight, bias, out=whole[:tokens, : rows // 2], schedule=schedule)
    assert_rounded(y, gate / (1 + torch.exp(-gate)) * up, schedule)
    assert not weight.arrived.any(), "counters are left as they were found"
    assert whole[:, rows // 2 :].isnan().all()
    assert whole[tokens:].isnan().all()


@pytest.mark.parametrize("late_copies", [False, True])
@pytest.mark.parametrize(("bits", "rows", "columns", "groups", "zeros", "tokens", "schedule"), CASES, ids=str)
def test_gates_multiply_their_outputs(bits, rows, columns, groups, zeros, tokens, schedule, late_copies, monkeypatch):
    prepare = partial(run_units_in_python, monkeypatch, late_copies)
    check(bits, rows, columns, groups, zeros, tokens, schedule, prepare)


FORMATS = [(4, 32, False), (4, 32, True), (4, 1, True), (8, 1, False)]


@pytest.mark.parametrize(("tokens", "numbers"), some_pairs(GATED_SCHEDULES, FORMATS, 2), ids=str)
def test_nothing_is_spilled_where_tiles_are_multiplied(tokens, numbers, monkeypatch, tmp_path):
    from bladellm_kernels import unit_call
    from bladellm_kernels.unit_linear import unit_linear_silu_mul

    bits, groups, zeros = numbers
    weight = pack_units(*layer(512, 4096, groups, bits, zeros), bits)
    shape = unit_call.unit_shape
    monkeypatch.setattr(unit_call, "unit_shape", lambda *given: dataclasses.replace(shape(*given), plain=False))
    with compiled_launches() as compiled:
        unit_linear_silu_mul(torch.zeros(tokens, 4096).bfloat16(), weight, schedule=gated_schedule(tokens, 512))
    kernel = compiled["ring_units_kernel"]
    assert not spills_in_the_loop(kernel, tmp_path)
    assert kernel.metadata.shared <= 227 * 1024


def test_other_numbers_of_tokens_and_outputs_have_no_schedule():
    assert gated_schedule(16, 28672) is None
    assert gated_schedule(17, 28672) is GATED_SCHEDULES[32]
    assert gated_schedule(64, 28672) is GATED_SCHEDULES[64]
    assert gated_schedule(65, 28672) is GATED_SCHEDULES[256]
    assert gated_schedule(257, 28672) is None
    assert gated_schedule(32, 2 * 96) is None, "no whole tiles of gates"
    assert gated_schedule(32, 28672, fine=True) is None, "scales of many groups do not fit the registers"
    assert gated_schedule(32, 28672, rings=False) is None


def test_an_output_of_another_shape_is_refused():
    from bladellm_kernels.unit_linear import unit_linear_silu_mul

    weight = pack_units(*layer(256, 512, 4, 4, False), 4)
    x = torch.zeros(20, 512).bfloat16()
    with pytest.raises(ValueError, match=r"out must be .*\[20, 128\]"):
        unit_linear_silu_mul(x, weight, out=x.new_zeros(20, 256), schedule=GATED_SCHEDULES[32])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, 32, 33, 64, 70, 128, 129, 256])
@pytest.mark.parametrize(("bits", "groups", "zeros"), [(4, 32, False), (4, 32, True), (4, 1, False), (8, 1, False)])
def test_on_a_gpu(bits, groups, zeros, tokens):
    """By the table, for a layer like Llama-3.1-8B's, one whose tiles are divided among programs, and a small one."""
    for rows in (28672, 37888, 256):
        check(bits, rows, 4096, groups, zeros, tokens, gated_schedule(tokens, rows), device="cuda")
