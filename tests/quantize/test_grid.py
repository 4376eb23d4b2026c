"""Grid: ranges and codes against loops over single numbers, and what must hold at the edges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.grid import Grid

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def store(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(max(value, torch.finfo(dtype).tiny), dtype=torch.float32).to(dtype))


def loop(values: list[float], bits: int, symmetric: bool, dtype: torch.dtype) -> tuple[float, int]:
    """Scale and zero point of one group."""
    if symmetric:
        scale, zero = store(max(abs(value) for value in values) / ((2**bits - 1) / 2), dtype), 2 ** (bits - 1)
    else:
        low, high = min(0.0, *values), max(0.0, *values)
        scale = store((high - low) / (2**bits - 1), dtype)
        zero = min(max(round(-low / scale), 0), 2**bits - 1)
    return scale, zero


def is_nearest(code: int, value: float, scale: float, zero: int, bits: int) -> bool:
    """Whether no other code is nearer, but for the rounding of value / scale."""
    distances = [abs(scale * (other - zero) - value) for other in range(2**bits)]
    return distances[code] <= min(distances) + 1e-6 * abs(value)


@pytest.mark.turns
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 7, 16])
def test_ranges_and_codes_are_those_of_the_formula(dtype, bits, symmetric, group_size):
    columns = 112
    weight = (torch.randn(9, columns) + torch.randn(9, 1)) * torch.rand(9, 1)
    grid = Grid(Scheme(bits, group_size=group_size, symmetric=symmetric), dtype)
    scales, zeros = grid.ranges(weight)
    codes = grid.codes(weight, scales, zeros)
    assert scales.dtype == dtype
    assert codes.dtype == torch.uint8
    size = group_size or columns
    for row in range(9):
        for group in range(columns // size):
            part = slice(group * size, (group + 1) * size)
            values = weight[row, part].tolist()
            scale, zero = loop(values, bits, symmetric, dtype)
            stored = float(scales[row, group])
            # A double rounded to the stored type may be one step from a float32 rounded to it.
            assert stored == pytest.approx(scale, rel=torch.finfo(dtype).eps)
            used = 2 ** (bits - 1) if zeros is None else int(zeros[row, group])
            assert abs(used - zero) <= (stored != scale)
            for code, value in zip(codes[row, part].tolist(), values, strict=True):
                assert is_nearest(code, value, stored, used, bits)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    exponent=st.integers(-40, 4),
    shift=st.sampled_from([-3.0, 0.0, 0.3, 3.0]),
    bits=st.sampled_from([4, 8]),
    symmetric=st.booleans(),
)
def test_rounding_moves_a_weight_by_half_a_step_at_most(seed, exponent, shift, bits, symmetric):
    """Up to what rounding the scale itself adds at the ends of the range."""
    torch.manual_seed(seed)
    weight = (torch.randn(5, 48) + shift) * 10.0**exponent
    grid = Grid(Scheme(bits, group_size=16, symmetric=symmetric), torch.bfloat16)
    rounded = grid.quantize(weight)
    assert rounded.dequantize().isfinite().all()
    scales = rounded.scales.float().repeat_interleave(16, 1)
    zero_point = 0.0 if symmetric else 0.5
    assert ((rounded.dequantize() - weight).abs() <= scales * (0.501 + zero_point + 2**bits * 2**-8)).all()


@pytest.mark.parametrize("offset", [0.0, 5.0, -5.0])
def test_an_asymmetric_grid_holds_zero_exactly(offset):
    weight = torch.randn(6, 64) + offset
    weight[:, ::5] = 0
    rounded = Grid(Scheme(4, group_size=32, symmetric=False), torch.float16).quantize(weight)
    assert not rounded.dequantize()[:, ::5].any()


@pytest.mark.parametrize("symmetric", [True, False])
def test_codes_are_those_of_the_stored_scale(symmetric):
    """Rounding with the unrounded scale would give other codes: they must be nearest with the one a server reads."""
    weight = torch.randn(64, 128)
    grid = Grid(Scheme(8, group_size=64, symmetric=symmetric), torch.bfloat16)
    rounded = grid.quantize(weight)
    for step in (-1, 1):
        moved = (rounded.codes.int() + step).clamp(0, 255).to(torch.uint8)
        other = type(rounded)(rounded.scheme, moved, rounded.scales, rounded.zeros).dequantize()
        assert ((rounded.dequantize() - weight).abs() <= (other - weight).abs() + 1e-6).all()


def test_a_shrunk_range_saturates():
    weight = torch.linspace(-1, 1, 33)[None]
    grid = Grid(Scheme(4), torch.float32)
    whole, half = grid.quantize(weight), grid.quantize(weight, 0.5)
    assert torch.equal(half.scales, whole.scales / 2)
    assert half.codes[0, :8].tolist() == [0] * 8
    assert half.codes[0, -8:].tolist() == [15] * 8
    each = torch.tensor([[1.0, 0.5]])
    mixed = Grid(Scheme(4, group_size=16), torch.float32).ranges(weight[:, :32], each)[0]
    plain = Grid(Scheme(4, group_size=16), torch.float32).ranges(weight[:, :32])[0]
    assert torch.equal(mixed, plain * each)


def test_the_least_zero_point_of_a_format_is_kept():
    weight = torch.rand(7, 32) + 0.1
    for lowest in (0, 1):
        rounded = Grid(Scheme(4, group_size=16, symmetric=False), torch.float16, lowest_zero=lowest).quantize(weight)
        assert (rounded.zeros == lowest).all()
        step = rounded.scales.float().repeat_interleave(16, 1)
        assert ((rounded.dequantize() - weight).abs() <= step * (0.51 + lowest)).all()


@pytest.mark.parametrize("scheme", [Scheme(4), Scheme(4, symmetric=False), Scheme(8, "fp8")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_too_small_for_a_scale_become_zero(scheme, dtype):
    weight = torch.cat([torch.zeros(2, 16), torch.randn(2, 16) * 1e-42])
    rounded = Grid(scheme, dtype).quantize(weight)
    assert (rounded.scales.float() > 0).all()
    assert (rounded.dequantize().abs() <= 1e-37).all()
    assert not rounded.dequantize()[:2].any()


def test_fp8_codes_are_a_cast_with_the_row_scale():
    weight = torch.randn(5, 40) * torch.logspace(-3, 3, 5)[:, None]
    rounded = Grid(Scheme(8, "fp8"), torch.float32).quantize(weight)
    assert rounded.codes.dtype == torch.float8_e4m3fn
    assert torch.allclose(rounded.scales[:, 0], weight.abs().amax(1) / 448)
    assert (rounded.codes.float().abs().amax(1) == 448).all()
    relative = (rounded.dequantize() - weight).abs() / weight.abs()
    large = weight.abs() > rounded.scales * 2**-6
    assert relative[large].max() <= 2**-4 + 1e-6
