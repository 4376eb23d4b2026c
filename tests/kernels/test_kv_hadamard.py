"""The Hadamard rotation: orthonormal, harmless to scores, and good for outlier channels."""

import pytest
import torch
from bladellm_kernels.hadamard import hadamard, hadamard_matrix, hadamard_reference
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_quantize import kv_quantize
from bladellm_kernels.kv_read import dequantize_kv

from tests.kernels.conditions import DEVICES, DTYPES, assert_close
from tests.kernels.kv_memory import numbers

pytestmark = pytest.mark.parametrize("device", DEVICES)
POWERS = [2, 4, 16, 64, 128, 256]
OTHERS = [24, 40, 48, 80, 96, 160, 192, 320]


@pytest.mark.parametrize("size", POWERS + OTHERS)
def test_rows_are_orthogonal_and_of_ones(device, size):
    matrix = hadamard_matrix(size, torch.float32, device)
    assert torch.equal(matrix.abs(), torch.ones_like(matrix))
    assert torch.equal(matrix @ matrix.T, size * torch.eye(size, device=device))
    half = size // 2
    assert torch.equal(matrix[:half, half:], matrix[:half, :half])
    assert torch.equal(matrix[half:, half:], -matrix[:half, :half])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", POWERS)
def test_a_power_of_two_is_butterflies_and_its_own_inverse(device, dtype, size):
    x = torch.randn(5, 3, size, device=device).to(dtype)
    turned = hadamard(x)
    assert turned.dtype == dtype
    assert_close(turned, hadamard_reference(x).float(), dtype)
    assert_close(hadamard(turned), x.float(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 128, 96, 80])
def test_scores_stay(device, dtype, size):
    q, k = (torch.randn(7, size, device=device).to(dtype) for _ in range(2))
    matrix = hadamard_matrix(size, dtype, device)
    scores = hadamard(q, matrix).float() @ hadamard(k, matrix).float().T
    assert_close(scores / size**0.5, q.float() @ k.float().T / size**0.5, dtype)


def test_out_and_a_matrix_at_hand(device):
    x = torch.randn(3, 32, device=device)
    out = torch.full((3, 2, 32), torch.nan, device=device)[:, 1]
    assert hadamard(x, hadamard_matrix(32, torch.bfloat16, device), out=out) is out
    assert torch.equal(out, hadamard(x))


@pytest.mark.parametrize("name", ["int4", "int4_affine"])
def test_outlier_channels_cost_less_when_rotated(device, name):
    format = KV_FORMATS[name]
    x = numbers("outliers", 200, 128).to(device)

    def error(x: torch.Tensor) -> float:
        return float((dequantize_kv(*kv_quantize(x, format), format) - x).square().mean())

    assert error(hadamard(x)) < error(x) / 2


@pytest.mark.parametrize("size", [1, 3, 12, 20, 36, 100, 120])
def test_other_sizes_are_refused_by_name(device, size):
    with pytest.raises(ValueError, match=f"head size {size}:"):
        hadamard(torch.randn(2, size, device=device))


def test_a_matrix_of_another_size_is_refused(device):
    with pytest.raises(ValueError, match="head size 8 needs"):
        hadamard(torch.randn(2, 8, device=device), hadamard_matrix(4, torch.float32, device))
