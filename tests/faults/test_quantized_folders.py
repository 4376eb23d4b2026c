"""Rows 51 and 52 of the fault table for quantized folders: refused in one sentence that names file, key or field."""

import functools
import math
from pathlib import Path

import pytest
import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.loading import load_model
from tests.faults import folders
from tests.models.harness import Sequences, load_tiny
from tests.models.quantized import FILE, SCHEMES, Tiny, edit_config, edit_tensors, plan, shard

MODULE = "model.layers.1.self_attn.q_proj"
SCALES = {"compressed-tensors": "weight_scale", "gptq": "scales", "awq": "scales"}
CODES = {"compressed-tensors": "weight_packed", "gptq": "qweight", "awq": "qweight"}


refusal = functools.partial(folders.refusal, longest=500)


@pytest.fixture(params=list(SCALES))
def method(request):
    return request.param


@pytest.fixture
def whole(tmp_path, method):
    """A whole quantized tiny model."""
    return Tiny(tmp_path, plan(method, SCHEMES["w4 g16 asymmetric"])).folder


def save(folder, name, method="compressed-tensors", **options):
    return Tiny(folder, plan(method, SCHEMES[name]), **options).folder


def replace(folder, suffix, change, module=MODULE):
    """Give a tensor of a layer another value."""
    key = f"{module}.{suffix}"

    def apply(tensors):
        tensors[key] = change(tensors[key])

    edit_tensors(folder, apply)
    return key


def poisoned(value):
    def change(scales):
        scales = scales.clone()
        scales.view(-1)[3] = value
        return scales

    return change


def test_row_51_whole_folders_load(whole):
    assert torch.isfinite(Sequences(load_tiny(whole)).step([(0, [1, 2, 3])])[0]).all()


@pytest.mark.parametrize("which", [SCALES, CODES], ids=["scales", "codes"])
def test_row_51_missing_tensor(whole, method, which):
    key = f"{MODULE}.{which[method]}"
    edit_tensors(whole, lambda tensors: tensors.pop(key))
    refusal(whole, whole / FILE, MODULE)


@pytest.mark.parametrize("which", [SCALES, CODES], ids=["scales", "codes"])
@pytest.mark.parametrize("change", [lambda t: t[:-1].clone(), lambda t: t.repeat(2, 1), lambda t: t.flatten()])
def test_row_51_misshaped_tensor(whole, method, which, change):
    key = replace(whole, which[method], change)
    refusal(whole, whole / FILE, key, "shape", "hidden_size")


@pytest.mark.parametrize("which", [SCALES, CODES], ids=["scales", "codes"])
def test_row_51_tensor_of_another_type(whole, method, which):
    key = replace(whole, which[method], lambda tensor: tensor.to(torch.int16))
    refusal(whole, whole / FILE, key, "I16")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_row_51_scales_that_are_no_numbers(whole, method, value):
    key = replace(whole, SCALES[method], poisoned(value))
    refusal(whole, whole / FILE, key)


def test_row_51_scales_that_are_no_numbers_in_a_shard(whole, method):
    key = replace(whole, SCALES[method], poisoned(math.nan))
    shard(whole, 4)
    refusal(whole, whole / "model-0000", key)


def test_row_51_floating_point_and_quantized_at_once(whole):
    key = f"{MODULE}.weight"
    edit_tensors(whole, lambda tensors: tensors.update({key: torch.zeros(48, 48)}))
    refusal(whole, whole / FILE, key, "quantized")


def test_row_51_tensors_of_a_layer_the_config_leaves_plain(tmp_path):
    folder = save(tmp_path, "w4 g16")
    edit_config(folder, quantization_config=plan("compressed-tensors", SCHEMES["w4 g16"], ("lm_head", MODULE)))
    refusal(folder, MODULE, "missing")


def test_row_51_plain_folder_with_a_quantized_config(tmp_path):
    folder = save(tmp_path, "w4 g16")
    edit_config(folder, quantization_config=None)
    refusal(folder, folder / FILE, "self_attn", "missing")


def test_row_51_bias_that_no_config_announces(whole):
    key = f"{MODULE}.bias"
    edit_tensors(whole, lambda tensors: tensors.update({key: torch.ones(48)}))
    refusal(whole, whole / FILE, key, "not part of")


def test_row_51_scales_of_a_kv_cache_that_no_config_announces(whole):
    key = "model.layers.0.self_attn.k_scale"
    edit_tensors(whole, lambda tensors: tensors.update({key: torch.ones(1)}))
    refusal(whole, whole / FILE, key)


@pytest.mark.parametrize("g_idx", [-2, 3, 2**31 - 1])
def test_row_51_g_idx_out_of_range(tmp_path, g_idx):
    folder = save(tmp_path, "w4 g16", "gptq")
    key = replace(folder, "g_idx", poisoned(g_idx))
    refusal(folder, folder / FILE, key)


def test_row_51_weight_shape_that_contradicts_the_config(tmp_path):
    folder = save(tmp_path, "w4 g16")
    key = replace(folder, "weight_shape", lambda shape: shape.flip(0) + 1)
    refusal(folder, folder / FILE, key)


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0])
@pytest.mark.parametrize("name", ["w8a8 static", "fp8 static"])
def test_row_51_input_scale_that_is_no_scale(tmp_path, name, value):
    folder = save(tmp_path, name)
    key = replace(folder, "input_scale", lambda scale: torch.full_like(scale, value))
    refusal(folder, folder / FILE, key)


def test_row_51_fp8_codes_that_are_no_numbers(tmp_path):
    folder = save(tmp_path, "fp8 weights")
    key = replace(folder, "weight", lambda codes: poisoned(127)(codes.view(torch.uint8)).view(torch.float8_e4m3fn))
    refusal(folder, folder / FILE, key)


def test_row_51_refused_values_leave_no_open_file(whole, method):
    replace(whole, SCALES[method], poisoned(math.nan))
    refusal(whole)
    assert str(whole) not in Path("/proc/self/maps").read_text()


def test_row_51_loaded_weights_do_not_lean_on_the_file(tmp_path):
    """The folder may be replaced while the model serves."""
    model = load_tiny(save(tmp_path, "fp8 weights"))
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert model.weight_bytes > 0


def changed(method, **changes):
    return {**plan(method, SCHEMES["w4 g16"]), **changes}


def changed_group(**changes):
    config = plan("compressed-tensors", SCHEMES["w4 g16"])
    return {**config, "config_groups": {"group_0": {**config["config_groups"]["group_0"], **changes}}}


BAD_CONFIGS = [
    ({}, "quant_method"),
    ([], "quantization_config"),
    ("gptq", "quantization_config"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method"),
    ({"quant_method": "fp8"}, "quant_method"),
    ({"quant_method": 4}, "quant_method"),
    (changed("gptq", bits=3), "bits"),
    (changed("gptq", bits="4"), "bits"),
    (changed("gptq", group_size=0), "group_size"),
    (changed("gptq", group_size=-7), "group_size"),
    (changed("gptq", sym="yes"), "sym"),
    (changed("gptq", checkpoint_format="marlin"), "checkpoint_format"),
    (changed("gptq", dynamic={"+:(": {}}), "dynamic"),
    (changed("awq", bits=8), "bits"),
    (changed("awq", version="gemv"), "version"),
    (changed("awq", modules_to_not_convert="lm_head"), "modules_to_not_convert"),
    (changed("compressed-tensors", config_groups=None), "config_groups"),
    (changed("compressed-tensors", config_groups=[]), "config_groups"),
    (changed("compressed-tensors", ignore=[1]), "ignore"),
    (changed_group(format="marlin-24"), "format"),
    (changed_group(weights=None), "weights"),
    (changed_group(targets=["re:("]), "targets"),
    (changed_group(input_activations={"num_bits": 4}), "input_activations"),
]


@pytest.mark.parametrize(("config", "field"), BAD_CONFIGS, ids=lambda item: str(item)[:60])
def test_row_52_quantization_config(tmp_path, config, field):
    folder = save(tmp_path, "w4 g16")
    edit_config(folder, quantization_config=config)
    refusal(folder, folder / "config.json", field)


@pytest.mark.parametrize("group_size", [32, 5, 2**15])
def test_row_52_group_size_that_does_not_divide(tmp_path, method, group_size):
    folder = save(tmp_path, "w4 g16", method)
    one = SCHEMES["w4 g16"]
    edit_config(folder, quantization_config=plan(method, type(one)(4, group_size=group_size)))
    refusal(folder, "q_proj", f"group size {group_size}", "48")


def test_row_52_group_size_that_the_tensors_contradict(whole, method):
    one = SCHEMES["w4 g16 asymmetric"]
    edit_config(whole, quantization_config=plan(method, type(one)(4, group_size=8, symmetric=False)))
    refusal(whole, whole / FILE, "shape", "quantization_config")


def test_row_52_shapes_that_no_words_hold(tmp_path):
    """Dummy weights of a real scheme need what stored ones need."""
    folder = save(tmp_path, "w4 g16", "gptq")
    edit_config(folder, head_dim=9 * 2)
    edit_config(folder, num_attention_heads=2, num_key_value_heads=1)
    spec = read_model_spec(folder)
    with pytest.raises(CheckpointError, match=r"config\.json: model\.layers\.0\.self_attn\.\w+\.qweight has"):
        load_model(folder, spec, device=torch.device("cpu"), dtype=torch.float32, load_format="dummy", seed=0)


def test_row_52_model_larger_than_the_memory(tmp_path):
    folder = save(tmp_path, "w4 g16")
    edit_config(folder, hidden_size=2**17, intermediate_size=2**20, num_hidden_layers=1024, head_dim=128)
    spec = read_model_spec(folder)
    with pytest.raises(CheckpointError, match=r"GiB are free on cpu"):
        load_model(folder, spec, device=torch.device("cpu"), dtype=torch.float32, load_format="dummy", seed=0)


def test_row_52_schemes_without_an_operator(tmp_path):
    folder = save(tmp_path, "w8a8 dynamic")
    config = plan("compressed-tensors", SCHEMES["w8a8 dynamic"])
    weights = config["config_groups"]["group_0"]["weights"]
    config["config_groups"]["group_0"]["weights"] = {**weights, "num_bits": 4}
    edit_config(folder, quantization_config=config)
    refusal(folder)
