"""What holds for all formats: one weight means the same in each; methods are told apart and others refused."""

from typing import Any

import pytest
import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.quantization.registry import FORMATS, read_quantization
from bladellm_runtime.quantization.scheme import Scheme
from tests.quantization.reference import fields, random_weight
from tests.quantization.samples import W4A16
from tests.quantization.test_awq import AUTOAWQ
from tests.quantization.test_gptq import AUTOGPTQ

MODULE = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 16, 32])
def test_all_formats_dequantize_to_identical_values(symmetric: bool, group_size: int | None, device: str) -> None:
    scheme = Scheme(4, "int", group_size, symmetric)
    weight = random_weight(scheme, 40, 96, lowest_zero=1, device=device)
    for name, form in FORMATS.items():
        tensors = form.plan(scheme, ["lm_head"]).pack(weight)
        read = read_quantization(fields(form.plan(scheme, ["lm_head"]).config()))
        found = read.scheme_of(MODULE, {f"{MODULE}.{suffix}" for suffix in tensors})
        assert found is not None
        back = read.unpack(found, 40, 96, tensors)
        assert torch.equal(back.dequantize(), weight.dequantize()), name
        assert torch.equal(back.codes, weight.codes), name
        assert torch.equal(back.scales, weight.scales), name


def test_gptq_and_awq_store_scales_in_half_precision() -> None:
    scheme = Scheme(4, "int", 32)
    for dtype in (torch.float32, torch.bfloat16):
        weight = random_weight(scheme, 8, 64, dtype=dtype)
        for name in ("gptq", "awq"):
            stored = FORMATS[name].plan(scheme, []).pack(weight)["scales"]
            assert stored.dtype == FORMATS[name].plan(scheme, []).scale_dtype(dtype) == torch.float16
            assert torch.equal(stored, weight.scales.half().t())


def test_the_zero_point_16_is_held_by_gptq_alone() -> None:
    scheme = Scheme(4, "int", 32, symmetric=False)
    weight = random_weight(scheme, 8, 32)
    assert weight.zeros is not None
    weight.zeros.fill_(16)
    form = FORMATS["gptq"].plan(scheme, [])
    assert torch.equal(form.unpack(scheme, 8, 32, form.pack(weight)).dequantize(), weight.dequantize())
    for name in ("compressed-tensors", "awq"):
        with pytest.raises(CheckpointError, match="cannot hold the zero point 16 in 4 bits"):
            FORMATS[name].plan(scheme, []).pack(weight)


def test_gptq_stores_what_compressed_tensors_does_transposed() -> None:
    scheme = Scheme(4, "int", 32, symmetric=False)
    weight = random_weight(scheme, 40, 96)
    ours = FORMATS["compressed-tensors"].plan(scheme, []).pack(weight)
    values = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"}
    theirs = read_quantization(fields(values)).pack(weight)
    assert torch.equal(theirs["qweight"], ours["weight_packed"].t())
    assert torch.equal(theirs["scales"], ours["weight_scale"].t())
    assert torch.equal(theirs["qzeros"], ours["weight_zero_point"].t())


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (W4A16, "compressed-tensors"),
        (W4A16 | {"quant_method": "compressed_tensors"}, "compressed-tensors"),
        (AUTOGPTQ, "gptq"),
        (AUTOAWQ, "awq"),
        (AUTOAWQ | {"quant_method": "AWQ"}, "awq"),
    ],
)
def test_methods_are_told_apart(values: dict[str, Any], name: str) -> None:
    form = read_quantization(fields(values))
    assert form.name == name
    assert hash(form) == hash(read_quantization(fields(values)))
    assert type(form) is FORMATS[name]


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "gguf", "fp8", "modelopt", "auto-round", "mxfp4", ""])
def test_other_methods_are_refused(method: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_quantization(fields({"quant_method": method, "bits": 4, "load_in_4bit": True}))
    assert str(caught.value) == (
        f"config.json: quantization_config.quant_method {method!r} is not supported; "
        "it must be one of compressed-tensors, gptq, awq"
    )


def test_a_config_without_a_method_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"^config.json: quantization_config.quant_method is missing$"):
        read_quantization(fields({"bits": 4}))
