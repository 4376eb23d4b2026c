"""compressed-tensors layers, against the library that defines them."""

from collections.abc import Callable

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from compressed_tensors.quantization.lifecycle.forward import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.quantization.compressed_tensors import CompressedTensors
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight
from tests.quantization.reference import assert_same, random_weight
from tests.quantization.samples import DTYPES, FP8_STATIC_KV, SCHEMES, UP, W4A16, changed, parse


def library_scheme(form: CompressedTensors) -> QuantizationScheme:
    """The one group of a config, as the library reads it."""
    config = QuantizationConfig.model_validate(form.config())
    (scheme,) = config.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    return scheme


def library_weight(form: CompressedTensors, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight the library decompresses tensors to, with the compressor the config names."""
    scheme = library_scheme(form)
    assert scheme.format is not None
    compressor = BaseCompressor.get_value_from_registry(scheme.format)
    return compressor.decompress(dict(tensors), scheme)["weight"]


def library_tensors(scheme: Scheme, form: CompressedTensors, weight: QuantizedWeight) -> dict[str, torch.Tensor]:
    """What the library stores for the weight `weight` stands for, given its scales and zero points."""
    theirs = library_scheme(form)
    state = {"weight": weight.dequantize(), "weight_scale": weight.scales.float()}
    if weight.zeros is not None:
        state["weight_zero_point"] = (weight.zeros.int() - scheme.middle).to(torch.int8)
    assert theirs.format is not None
    return BaseCompressor.get_value_from_registry(theirs.format).compress(state, theirs)


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize(("rows", "columns"), [(24, 96), (7, 48), (1, 144)])
@settings(deadline=None, max_examples=4)
@given(dtype=st.sampled_from(DTYPES))
def test_layers_read_back_and_decompress_to_the_same(
    scheme: Scheme, rows: int, columns: int, dtype: torch.dtype
) -> None:
    form = CompressedTensors.plan(scheme, ["lm_head"])
    weight = random_weight(scheme, rows, columns, dtype=dtype)
    tensors = form.pack(weight)
    for entry in form.tensors(scheme, rows, columns):
        assert not entry.required or tuple(tensors[entry.suffix].shape) == entry.shape
    again = parse(form.config())
    assert again.scheme_of(UP, set()) == scheme
    assert_same(weight, again.unpack(scheme, rows, columns, tensors))
    exact = dict(tensors, weight_scale=tensors["weight_scale"].float())
    assert torch.equal(library_weight(form, exact), weight.dequantize())
    assert library_weight(form, tensors).dtype == dtype


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_the_library_stores_the_same_tensors(scheme: Scheme) -> None:
    form = CompressedTensors.plan(scheme, [])
    weight = random_weight(scheme, 20, 96, dtype=torch.float32)
    theirs, ours = library_tensors(scheme, form, weight), form.pack(weight)
    assert set(ours) - {"input_scale"} == set(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].float(), tensor.float()), name


@pytest.mark.parametrize("channels", [1, 7, 40])
def test_odd_numbers_of_inputs(channels: int, device: str) -> None:
    for bits in (4, 8):
        for columns in (1, 3, 13, 37):
            scheme = Scheme(bits, symmetric=False)
            form = CompressedTensors.plan(scheme, [])
            weight = random_weight(scheme, channels, columns, device=device)
            back = form.unpack(scheme, channels, columns, form.pack(weight))
            assert_same(weight, back)
            assert back.codes.is_contiguous()


@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_scrambled_columns(actorder: object) -> None:
    values = changed(changed(W4A16, "weights.actorder", actorder), "weights.group_size", 16)
    form, scheme = parse(values), Scheme(4, "int", 16)
    assert form.scheme_of(UP, set()) == scheme
    weight = random_weight(scheme, 12, 96, scrambled=True)
    tensors = form.pack(weight)
    assert {entry.suffix for entry in form.tensors(scheme, 12, 96)} == set(tensors)
    assert_same(weight, form.unpack(scheme, 12, 96, tensors))
    groups = tensors["weight_g_idx"]
    plain = {name: tensors[name] for name in ("weight_packed", "weight_scale", "weight_shape")}
    expected = (library_codes(plain, 4) - 8) * weight.scales.float()[:, groups.long()]
    assert torch.equal(form.unpack(scheme, 12, 96, tensors).dequantize(), expected)
    tensors["weight_g_idx"].fill_(-1)
    assert form.unpack(scheme, 12, 96, tensors).order is None
    tensors["weight_g_idx"][0] = 6
    with pytest.raises(CheckpointError, match=r"^weight_g_idx must hold groups from 0 to 5"):
        form.unpack(scheme, 12, 96, tensors)


def library_codes(tensors: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """Unsigned codes, float32 [N, K], by the library's unpacking."""
    shape = torch.Size(tensors["weight_shape"].tolist())
    return unpack_from_int32(tensors["weight_packed"], bits, shape).float() + 2 ** (bits - 1)


def test_one_scale_for_a_whole_weight() -> None:
    form, scheme = parse(FP8_STATIC_KV), Scheme(8, "fp8", activations="static")
    assert form.scheme_of(UP, set()) == scheme
    codes = torch.randn(6, 10).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": torch.tensor([0.25]), "input_scale": torch.tensor([0.5])}
    shapes = {entry.suffix: entry.shape for entry in form.tensors(scheme, 6, 10) if entry.required}
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    weight = form.unpack(scheme, 6, 10, tensors)
    assert weight.scales.shape == (6, 1)
    assert weight.scales.is_contiguous()
    assert weight.input_scale == 0.5
    assert torch.equal(weight.dequantize(), codes.float() * 0.25)
    for name, tensor in form.pack(weight).items():
        assert torch.equal(tensor.float(), tensors[name].float())
    weight.scales[2] = 0.5
    with pytest.raises(CheckpointError, match=r"^weight_scale differs between outputs"):
        form.pack(weight)


def test_quantized_weights_of_the_library_read_as_their_values() -> None:
    """A float weight, quantized and stored by the library, reads as what the library's fake quantization gives."""
    weight, scales = torch.randn(10, 64), torch.rand(10, 2) * 0.2 + 0.05
    zeros = torch.randint(-8, 8, (10, 2)).to(torch.int8)
    args = QuantizationArgs(num_bits=4, symmetric=False, group_size=32)
    scheme = QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    stored = compressor.compress({"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}, scheme)
    ours = Scheme(4, "int", 32, symmetric=False)
    read = CompressedTensors.plan(ours, []).unpack(ours, 10, 64, stored)
    steps = quantize(weight, scales, zeros, args, dtype=torch.int8).int() + 8
    assert torch.equal(read.codes.int(), steps)
    assert torch.equal(read.dequantize(), compressor.decompress(stored, scheme)["weight"])


Spoil = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("scheme", "spoil", "says"),
    [
        (Scheme(4), lambda t: t["weight_shape"].add_(1), r"weight_shape is \[17, 65\], .* \[16, 64\]"),
        (Scheme(4), lambda t: t["weight_scale"][3].fill_(float("nan")), "weight_scale has NaN or infinite values"),
        (Scheme(8, "fp8"), lambda t: t["weight"].view(torch.uint8)[2, 3].fill_(0x7F), "weight has NaN values"),
        (Scheme(8, "fp8"), lambda t: t["weight"].view(torch.uint8)[2, 3].fill_(0xFF), "weight has NaN values"),
        (Scheme(8, activations="static"), lambda t: t["input_scale"].fill_(0), "input_scale must be positive"),
        (
            Scheme(8, activations="static"),
            lambda t: t.update(input_zero_point=torch.tensor([3], dtype=torch.int8)),
            "input_zero_point has zero points other than 0",
        ),
        (
            Scheme(8, activations="dynamic"),
            lambda t: t.update(weight_zero_point=torch.eye(16, 1, dtype=torch.int8)),
            "weight_zero_point has zero points other than 0",
        ),
    ],
)
def test_bad_values_are_refused(scheme: Scheme, spoil: Spoil, says: str) -> None:
    form = CompressedTensors.plan(scheme, [])
    tensors = form.pack(random_weight(scheme, 16, 64))
    spoil(tensors)
    with pytest.raises(CheckpointError, match=f"^{says}"):
        form.unpack(scheme, 16, 64, tensors)


def test_zero_points_of_symmetric_weights_may_be_stored() -> None:
    scheme = Scheme(8, activations="dynamic")
    form = CompressedTensors.plan(scheme, [])
    weight = random_weight(scheme, 16, 64)
    tensors = form.pack(weight) | {"weight_zero_point": torch.zeros(16, 1, dtype=torch.int8)}
    assert_same(weight, form.unpack(scheme, 16, 64, tensors))


def test_shapes_that_cannot_be_stored() -> None:
    form = CompressedTensors.plan(Scheme(4, "int", 32), [])
    with pytest.raises(CheckpointError, match=r"^weight_packed has 80 inputs, not a multiple of the group size 32"):
        form.tensors(Scheme(4, "int", 32), 8, 80)


def test_scrambled_columns_are_not_planned() -> None:
    """The library refuses `actorder` group since 2026: what no one reads is not written."""
    with pytest.raises(ValueError, match="has been removed"):
        QuantizationArgs(num_bits=4, group_size=32, actorder="group")
    with pytest.raises(ConfigError, match="--format gptq"):
        CompressedTensors.plan(Scheme(4, "int", 32), [], scrambled=True)
    form, scheme = CompressedTensors.plan(Scheme(4, "int", 32), []), Scheme(4, "int", 32)
    with pytest.raises(CheckpointError, match="actorder"):
        form.pack(random_weight(scheme, 8, 64, scrambled=True))
