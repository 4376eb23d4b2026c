"""rms_norm, silu_mul, embedding, widen and rotary against their references and against definitions."""

import pytest
import torch
from bladellm_kernels.embedding import embedding, embedding_reference
from bladellm_kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_quant,
    add_rms_norm_reference,
    gather_add_rms_norm,
    rms_norm,
    rms_norm_quant,
    rms_norm_reference,
)
from bladellm_kernels.rotary import rotary, rotary_reference, rotary_tables
from bladellm_kernels.silu_mul import silu_mul, silu_mul_quant, silu_mul_reference
from bladellm_kernels.widen import widen

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE, assert_close

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES, ids=str)]
SHAPES = [(1, 1), (3, 7), (17, 192), (2, 5, 33)]
CODE_TYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("eps", [1e-6, 0.3])
def test_rms_norm(device, dtype, shape, eps):
    x, weight = torch.randn(shape, device=device).to(dtype), torch.randn(shape[-1], device=device).to(dtype)
    assert_close(rms_norm(x, weight, eps), rms_norm_reference(x, weight, eps), dtype)


def test_rms_norm_of_large_and_small_values_keeps_its_scale(device, dtype):
    """The mean square is taken in float32: 300² would overflow float16."""
    x = torch.randn(4, 64, device=device).to(dtype)
    weight = torch.ones(64, device=device, dtype=dtype)
    for scale in (300.0, 0.01):
        scaled = (x.float() * scale).to(dtype)
        assert_close(rms_norm(scaled, weight, 0.0), rms_norm_reference(scaled, weight, 0.0), dtype)


def test_rms_norm_of_zeros_is_zero(device, dtype):
    zeros = torch.zeros(2, 8, device=device, dtype=dtype)
    assert not rms_norm(zeros, torch.ones(8, device=device, dtype=dtype), 1e-6).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm_gives_both_and_leaves_its_inputs(device, dtype, shape):
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(shape[-1], device=device).to(dtype)
    kept = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    assert_close(normed, expected_normed, dtype)
    assert_close(total, expected_total, dtype)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])


def test_add_rms_norm_may_write_over_its_inputs(device, dtype):
    x, residual = (torch.randn(9, 40, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(40, device=device).to(dtype)
    expected = add_rms_norm_reference(x, residual, weight, 1e-5)
    normed, total = add_rms_norm(x, residual, weight, 1e-5, out=x, total=residual)
    assert normed is x
    assert total is residual
    assert_close(normed, expected[0], dtype)
    assert_close(total, expected[1], dtype)


@pytest.mark.parametrize("shape", [(6, 33), (20, 512)], ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_gathered_rows_are_normalised(device, dtype, shape, alone):
    """Some rows twice, some never; the others are poison."""
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    index = torch.tensor([4, 0, 4, 2, 5], device=device)
    x[1], residual[3] = torch.nan, torch.inf
    weight = torch.randn(shape[1], device=device).to(dtype)
    normed = gather_add_rms_norm(x, None if alone else residual, index, weight, 1e-6)
    total = x[index].float() + (0 if alone else residual[index].float())
    assert_close(normed, rms_norm_reference(total, weight, 1e-6), dtype)


@pytest.mark.parametrize("code_type", CODE_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (7, 96), (2, 3, 50)], ids=str)
def test_norms_rounded_to_8_bits(device, dtype, shape, code_type):
    """A row's largest magnitude is the largest code, and codes are within half a step of the norm."""
    x, residual = (torch.randn(shape, device=device).to(dtype) * 2 for _ in range(2))
    weight = torch.randn(shape[-1], device=device).to(dtype) + 2
    codes, scales = rms_norm_quant(x, weight, 1e-5, code_type)
    check_codes(codes, scales, rms_norm_reference(x, weight, 1e-5), dtype, code_type)
    codes, scales, total = add_rms_norm_quant(x, residual, weight, 1e-5, code_type)
    expected, expected_total = add_rms_norm_reference(x, residual, weight, 1e-5)
    check_codes(codes, scales, expected, dtype, code_type)
    assert_close(total, expected_total, dtype)


def check_codes(codes, scales, expected, dtype, code_type):
    """codes · scales against what was rounded, float32."""
    assert codes.dtype == code_type
    assert scales.dtype == torch.float32
    largest = 127 if code_type == torch.int8 else 448
    assert (codes.float().abs().amax(-1) == largest).all()
    step = torch.full_like(expected, 0.5) if code_type == torch.int8 else (codes.float().abs() / 16).clamp(min=2**-10)
    error = (codes.float() * scales - expected).abs()
    slack = TOLERANCE[dtype] * (expected.abs() + scales)
    assert (error <= step * scales * 1.001 + slack).all()


@pytest.mark.parametrize("code_type", CODE_TYPES, ids=str)
def test_rows_of_zeros_and_of_tiny_numbers_have_codes(device, dtype, code_type):
    gate_up = torch.zeros(3, 16, device=device, dtype=dtype)
    gate_up[1] = 1e-20 if dtype != torch.float16 else 1e-7
    codes, scales = silu_mul_quant(gate_up, code_type)
    assert (codes.float() * scales).abs().max() < 1e-13
    assert not codes[[0, 2]].float().any()
    assert (scales >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize("code_type", CODE_TYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (3, 1022)], ids=str)
def test_silu_mul_rounded_to_8_bits(device, dtype, shape, code_type):
    gate_up = (torch.randn(shape, device=device) * 3).to(dtype)
    codes, scales = silu_mul_quant(gate_up, code_type)
    check_codes(codes, scales, silu_mul_reference(gate_up), dtype, code_type)


@pytest.mark.parametrize("width", [1, 40, 1000, 2051])
def test_embedding_reads_ids_in_order_or_by_slot(device, dtype, width):
    weight = torch.randn(50, width + 3, device=device).to(dtype)[:, :width]
    ids, slots = torch.randint(0, 50, (13,), device=device), torch.randperm(13, device=device)[:7]
    assert torch.equal(embedding(ids, weight), embedding_reference(ids, weight))
    out = torch.full((9, width), torch.nan, device=device).to(dtype)
    assert torch.equal(embedding(ids, weight, slots, out=out[1:8]), embedding_reference(ids, weight, slots))
    assert out[0].isnan().all()
    assert out[8].isnan().all()
    for first in (0, 1, 17, 49, 60):  # a part of the rows
        part = weight[first : first + 20] if first < 50 else weight[:1]
        expected = embedding_reference(ids, part, slots, first)
        assert torch.equal(embedding(ids, part, slots, first=first), expected)
        assert torch.equal(embedding(ids, part, slots, first=first, out=out[1:8]), expected)


@pytest.mark.parametrize("shape", [(1, 1), (3, 2049), (5, 77)], ids=str)
def test_widen(device, dtype, shape):
    x = torch.randn(shape, device=device).to(dtype)
    out = torch.full(shape, torch.nan, device=device)
    assert torch.equal(widen(x), x.float())
    assert widen(x, out=out) is out
    assert torch.equal(out, x.float())


@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (3, 1022)], ids=str)
def test_silu_mul(device, dtype, shape):
    gate_up = (torch.randn(shape, device=device) * 3).to(dtype)
    kept = gate_up.clone()
    assert_close(silu_mul(gate_up), silu_mul_reference(gate_up), dtype)
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize(("tokens", "heads", "head_dim"), [(1, 1, 2), (5, 8, 32), (13, 3, 18)])
@pytest.mark.parametrize("scale", [1.0, 1.37])
def test_rotary(device, dtype, tokens, heads, head_dim, scale):
    packed = torch.randn(tokens, heads + 2, head_dim, device=device).to(dtype)
    x = packed[:, :heads]  # strided, as q and k are inside qkv
    positions = torch.randint(0, 5000, (tokens,), device=device)
    frequencies = torch.rand(head_dim // 2, device=device)
    cos, sin = rotary_tables(positions, frequencies, scale)
    assert_close(rotary(x, cos, sin), rotary_reference(x, positions, frequencies, scale), dtype)
    tables = rotary_tables(positions, frequencies.expand(tokens, -1).contiguous(), scale)
    assert torch.equal(tables[0], cos), "frequencies of each token that are the same"
    assert torch.equal(tables[1], sin)


def test_rotated_scores_depend_on_distance_only(device, dtype):
    """The property rotary is made for: q at m and k at n score as q at m + s and k at n + s."""
    x = torch.randn(1, 2, 16, device=device).to(dtype).expand(4, 2, 16)
    positions = torch.tensor([9, 4, 109, 104], device=device)
    q9, k4, q109, k104 = rotary(x, *rotary_tables(positions, torch.rand(8, device=device), 1.0)).float()
    limit = 0.2 if dtype != torch.float32 else 1e-3
    assert abs((q9[0] * k4[1]).sum() - (q109[0] * k104[1]).sum()) < limit


def test_wrong_arguments_are_refused(device, dtype):
    x, weight = torch.randn(2, 8, device=device).to(dtype), torch.ones(8, device=device, dtype=dtype)
    other = torch.float16 if dtype == torch.float32 else torch.float32
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, weight[:7], 1e-6)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm_quant(x, weight.to(other), 1e-6, torch.int8)
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match="residual must be"):
        gather_add_rms_norm(x, x.to(other), torch.zeros(1, dtype=torch.int64, device=device), weight, 1e-6)
    with pytest.raises(ValueError, match="code_type must be"):
        silu_mul_quant(x, torch.uint8)
