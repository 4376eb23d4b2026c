"""rms_norm, silu_mul and rotary against their references and against definitions."""

import pytest
import torch
from bladellm_kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from bladellm_kernels.rotary import rotary, rotary_reference, rotary_tables
from bladellm_kernels.silu_mul import silu_mul, silu_mul_reference

from tests.kernels.conditions import DEVICES, DTYPES, assert_close

pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("dtype", DTYPES, ids=str)]
SHAPES = [(1, 1), (3, 7), (17, 192), (2, 5, 33)]


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


def test_rotated_scores_depend_on_distance_only(device, dtype):
    """The property rotary is made for: q at m and k at n score as q at m + s and k at n + s."""
    x = torch.randn(1, 2, 16, device=device).to(dtype).expand(4, 2, 16)
    positions = torch.tensor([9, 4, 109, 104], device=device)
    q9, k4, q109, k104 = rotary(x, *rotary_tables(positions, torch.rand(8, device=device), 1.0)).float()
    limit = 0.2 if dtype != torch.float32 else 1e-3
    assert abs((q9[0] * k4[1]).sum() - (q109[0] * k104[1]).sum()) < limit
