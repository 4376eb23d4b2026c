"""kv_quantize: how far numbers may move, which scales are allowed, and the numbers that are no ordinary ones."""

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS, KvFormat
from bladellm_kernels.kv_quantize import kv_quantize
from bladellm_kernels.kv_read import dequantize_kv
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.conditions import DEVICES, DTYPES
from tests.kernels.kv_memory import INTEGER, KINDS, QUANTIZED, check_nearest, numbers
from tests.support.cases import examples

pytestmark = pytest.mark.parametrize("device", DEVICES)


def round_trip(x: torch.Tensor, format: KvFormat) -> torch.Tensor:
    return dequantize_kv(*kv_quantize(x, format), format)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "huge"])
def test_every_number_reads_back_within_half_a_step(device, dtype, name, kind):
    format = KV_FORMATS[name]
    for dim in (2, 18, 64):
        x = numbers(kind, 7, 3, dim, dtype=dtype)
        codes, scales = kv_quantize(x.to(device), format)
        assert (codes.dtype, codes.shape) == (format.storage, (7, 3, format.width(dim)))
        assert (scales.dtype, scales.shape) == (torch.float16, (7, 3, format.planes))
        check_nearest(x, codes.cpu(), scales.cpu(), format)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("kind", KINDS)
def test_devices_give_the_same_bits(device, name, kind):
    x = numbers(kind, 64, 32)
    codes, scales = kv_quantize(x.to(device), KV_FORMATS[name])
    expected, expected_scales = kv_quantize(x, KV_FORMATS[name])
    assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales.cpu().view(torch.int16), expected_scales.view(torch.int16))


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != "fp12_e4m7"])
def test_scales_are_the_least_float16_that_cover(device, name):
    """A larger one would waste codes. Zero is the largest float16 below all."""
    format = KV_FORMATS[name]
    x = torch.cat([numbers(kind, 40, 16) for kind in KINDS if kind != "huge"])
    _, scales = (part.cpu() for part in kv_quantize(x.to(device), format))
    every = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16).double()
    low = x.double().amin(-1) if format.affine else torch.zeros(len(x)).double()
    if format.affine:
        both = torch.cat((-every.flip(0), every))
        assert torch.equal(scales[:, 1].double(), both[torch.searchsorted(both, low, right=True) - 1])
        span = (x.double() - scales[:, 1:].double()).amax(-1)
    else:
        span = x.double().abs().amax(-1)
    # float32's division may be a rounding away from the real one.
    wanted = (span.float() / (format.highest - format.offset)).double()
    assert torch.equal(scales[:, 0].double(), every[torch.searchsorted(every, wanted)])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("subnormal", "huge")])
def test_12_bits_keep_what_bfloat16_has(device, kind):
    """All but numbers far below the largest, which move by what sums in float32 round to; scales are powers of two."""
    x = numbers(kind, 300, 128, dtype=torch.bfloat16)
    codes, scales = kv_quantize(x.to(device), KV_FORMATS["fp12_e4m7"])
    back, x = dequantize_kv(codes, scales, KV_FORMATS["fp12_e4m7"]).cpu().double(), x.double()
    largest = x.abs().amax(-1, keepdim=True)
    power = torch.where(largest > 0, torch.exp2(largest.log2().floor()), 0.0)
    assert torch.equal(scales.cpu().double(), power.clamp(min=2.0**-24) * (largest > 0))
    near = x.abs() >= scales.cpu().double() * 2.0**-14
    assert torch.equal(back[near], x[near])
    assert ((back - x).abs() <= scales.cpu().double() * 2.0**-22).all()


@settings(max_examples=examples(200), deadline=None)
@given(
    values=st.lists(st.floats(-60000, 60000, width=32), min_size=2, max_size=12).map(lambda x: x[: len(x) // 2 * 2]),
    name=st.sampled_from(QUANTIZED),
)
def test_any_numbers(device, values, name):
    x = torch.tensor(values)
    codes, scales = kv_quantize(x.to(device), KV_FORMATS[name])
    check_nearest(x, codes.cpu(), scales.cpu(), KV_FORMATS[name])


@pytest.mark.parametrize("name", QUANTIZED)
def test_zeros_and_constants(device, name):
    format = KV_FORMATS[name]
    for zero in (0.0, -0.0):
        x = torch.full((5, 8), zero, device=device)
        assert not kv_quantize(x, format)[1].any()
        assert not round_trip(x, format).any()
    if format.affine:
        x = torch.tensor([3.25, -0.5, 1000.0], device=device)[:, None].expand(3, 8)
        assert torch.equal(round_trip(x, format), x), "a float16 number that all share is exact"


@pytest.mark.parametrize("name", QUANTIZED)
def test_what_scales_cannot_reach_saturates(device, name):
    format = KV_FORMATS[name]
    reach = (32768.0 if format.float12 else 65504.0) * (format.highest - format.offset)
    for value in (3e38, float("inf")):
        x = torch.tensor([[value, 0.5, 0.0, 1.0], [-value, -0.5, 0.0, -1.0]], device=device)
        codes, scales = kv_quantize(x, format)
        back = dequantize_kv(codes, scales, format)
        assert scales.isfinite().all()
        assert back.isfinite().all()
        assert back[0, 0] >= 0.99 * reach
        assert back[1, 0] <= -min(65504.0, reach)
    everywhere = torch.full((1, 4), 1e9, device=device)
    assert (round_trip(everywhere, format) >= min(1e9, 0.99 * reach)).all()


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_nan_is_not_lost_and_stays_in_its_head(device, name):
    x = numbers("normal", 3, 4, 8).to(device)
    expected = round_trip(x, KV_FORMATS[name])
    x[1, 2, 5], x[0, 0, :] = torch.nan, torch.nan
    back = round_trip(x, KV_FORMATS[name])
    expected[1, 2], expected[0, 0] = torch.nan, torch.nan
    torch.testing.assert_close(back, expected, atol=0, rtol=0, equal_nan=True)


def test_halves_round_to_even(device):
    x = torch.tensor([[-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5, 127.0], [2.5, 0.5, 1.5, 3.5, 254.5, 255.0, 0.0, 4.5]])
    symmetric, scales = kv_quantize(x[:1].to(device), KV_FORMATS["int8"])
    assert scales.item() == 1.0
    assert symmetric.tolist() == [[-2, -2, 0, 0, 2, 2, 4, 127]]
    affine, scales = kv_quantize(x[1:].to(device), KV_FORMATS["int8_affine"])
    assert scales.tolist() == [[1.0, 0.0]]
    assert affine.tolist() == [[2, 0, 2, 4, 254, 255, 0, 4]]


def test_two_numbers_share_a_byte_low_nibble_first(device):
    x = torch.tensor([-7.0, 1.0, 2.0, 7.0, 0.0, -3.0]).to(device)
    codes, _ = kv_quantize(x, KV_FORMATS["int4"])
    assert codes.tolist() == [1 | 15 << 4, 9 | 8 << 4, 10 | 5 << 4], "number i with number i + D/2, lowered by 8"
    codes, _ = kv_quantize(torch.arange(6).float().to(device) * 3, KV_FORMATS["int4_affine"])
    assert codes.tolist() == [0 | 9 << 4, 3 | 12 << 4, 6 | 15 << 4]


@pytest.mark.parametrize("name", INTEGER)
def test_codes_stay_in_their_range(device, name):
    """A lowest int8 code of -128 would have no counterpart."""
    format = KV_FORMATS[name]
    x = torch.cat([numbers(kind, 50, 32) for kind in KINDS]).to(device)
    codes, _ = kv_quantize(x, format)
    plain = torch.cat((codes & 15, codes >> 4), -1) if format.nibbles else codes
    assert plain.min() >= format.lowest
    assert plain.max() <= format.highest
    assert (plain.amax(-1) == format.highest).any(), "the highest code is used"


def test_formats_that_cannot_hold_the_numbers_are_refused(device):
    with pytest.raises(ValueError, match="no_quant stores numbers as they are"):
        kv_quantize(torch.randn(2, 4, device=device), KV_FORMATS["no_quant"])
    with pytest.raises(ValueError, match="int4 needs an even head size, got 5"):
        kv_quantize(torch.randn(2, 5, device=device), KV_FORMATS["int4"])
