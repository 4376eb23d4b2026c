"""Wrong arguments of the quantized linear operators are named."""

from collections.abc import Callable

import pytest
import torch
from bladellm_kernels.fp8_linear import fp8_linear, pack_fp8
from bladellm_kernels.w4a16_linear import pack_w4a16, w4a16_linear
from bladellm_kernels.w8a8_linear import pack_w8a8, w8a8_linear
from bladellm_kernels.w8a16_linear import pack_w8a16, w8a16_linear

PACKS = {"w4a16": pack_w4a16, "w8a16": pack_w8a16, "w8a8": pack_w8a8}
LINEARS = {"w4a16": w4a16_linear, "w8a16": w8a16_linear, "w8a8": w8a8_linear, "fp8": fp8_linear}
CODES = torch.zeros(6, 8, dtype=torch.uint8)
SCALES = torch.ones(6, 1)


def packed(name: str) -> object:
    if name == "fp8":
        return pack_fp8(CODES.view(torch.float8_e4m3fn), SCALES, torch.float32)
    return PACKS[name](CODES, SCALES, None, torch.float32)


@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("codes", (CODES.int(), SCALES, None, torch.float32)),
        ("codes", (CODES[0], SCALES, None, torch.float32)),
        ("codes", (CODES[:0], SCALES[:0], None, torch.float32)),
        ("scales", (CODES, SCALES[:5], None, torch.float32)),
        ("scales", (CODES, torch.ones(6, 3), None, torch.float32)),
        ("scales", (CODES, SCALES.int(), None, torch.float32)),
        ("zeros", (CODES, SCALES, torch.zeros(6, 1), torch.float32)),
        ("zeros", (CODES, SCALES, torch.zeros(6, 2, dtype=torch.uint8), torch.float32)),
        ("dtype", (CODES, SCALES, None, torch.float64)),
    ],
)
def test_packing_names_the_wrong_argument(pack: Callable, name: str, arguments: tuple) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        pack(*arguments)


def test_codes_beyond_four_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="codes must be below 16, got 16"):
        pack_w4a16(CODES + 16, SCALES, None, torch.float32)


def test_scales_of_groups_are_refused_where_the_output_channel_must_have_one() -> None:
    with pytest.raises(ValueError, match="scales must be"):
        pack_w8a8(CODES, torch.ones(6, 2), None, torch.float32)
    with pytest.raises(ValueError, match="scales must be"):
        pack_fp8(CODES.view(torch.float8_e4m3fn), torch.ones(6, 2), torch.float32)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_float8_codes_must_be_numbers(code: int) -> None:
    codes = CODES.clone()
    codes[3, 4] = code
    with pytest.raises(ValueError, match="codes must not hold NaN"):
        pack_fp8(codes.view(torch.float8_e4m3fn), SCALES, torch.float32)
    with pytest.raises(ValueError, match="codes must be"):
        pack_fp8(codes, SCALES, torch.float32)


@pytest.mark.parametrize("operator", LINEARS)
@pytest.mark.parametrize(
    ("name", "x", "bias"),
    [
        ("x", torch.ones(2, 7), None),
        ("x", torch.ones(8), None),
        ("x", torch.ones(2, 8, dtype=torch.bfloat16), None),
        ("bias", torch.ones(2, 8), torch.ones(5)),
        ("bias", torch.ones(2, 8), torch.ones(6, dtype=torch.bfloat16)),
    ],
)
def test_operators_name_the_wrong_argument(operator: str, name: str, x: torch.Tensor, bias: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=f"^{name} must"):
        LINEARS[operator](x, packed(operator), bias)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_static_scale_must_be_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="input_scale must be positive"):
        w8a8_linear(torch.ones(2, 8), packed("w8a8"), input_scale=scale)
    with pytest.raises(ValueError, match="input_scale must be positive"):
        fp8_linear(torch.ones(2, 8), packed("fp8"), activations="static", input_scale=scale)


@pytest.mark.parametrize(("activations", "scale"), [("none", 1.0), ("dynamic", 1.0), ("static", None)])
def test_static_activations_and_only_they_have_a_scale(activations: str, scale: float | None) -> None:
    with pytest.raises(ValueError, match="input_scale must be given with static activations"):
        fp8_linear(torch.ones(2, 8), packed("fp8"), activations=activations, input_scale=scale)
