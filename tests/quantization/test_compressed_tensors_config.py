"""compressed-tensors configs, against the library that defines them and as they are found on hubs."""

import copy
import json
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.quantization.compressed_tensors import CompressedTensors
from bladellm_runtime.quantization.scheme import Scheme
from tests.quantization.samples import (
    DTYPES,
    FP8_DYNAMIC,
    FP8_STATIC_KV,
    MIXED,
    SCHEMES,
    UP,
    W4A16,
    W8A8,
    Config,
    changed,
    parse,
)


@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        (W4A16, Scheme(4, "int", 128)),
        (W8A8, Scheme(8, activations="dynamic")),
        (FP8_DYNAMIC, Scheme(8, "fp8", activations="dynamic")),
        (FP8_STATIC_KV, Scheme(8, "fp8", activations="static")),
        (changed(FP8_DYNAMIC, "input_activations.strategy", "tensor"), Scheme(8, "fp8", activations="dynamic")),
        (changed(FP8_DYNAMIC, "input_activations", None), Scheme(8, "fp8")),
        (changed(W8A8, "input_activations", None), Scheme(8)),
        (changed(W4A16, "weights", {"group_size": 64, "num_bits": 4}), Scheme(4, "int", 64)),
        (changed(W4A16, "weights", {"group_size": -1}), Scheme(8)),
        (changed(W4A16, "weights", {}), Scheme(8)),
        (changed(W4A16, "weights.type", "INT"), Scheme(4, "int", 128)),
        (changed(W4A16, "/format", None), Scheme(4, "int", 128)),
    ],
)
def test_configs_as_they_are_found(values: Config, scheme: Scheme) -> None:
    form = parse(values)
    assert form.scheme_of(UP, set()) == scheme
    assert form.scheme_of("lm_head", set()) is None
    assert form.config() == values


def library_args(scheme: Scheme) -> dict[str, Any]:
    kind = "float" if scheme.kind == "fp8" else "int"
    size = -1 if scheme.group_size is None else scheme.group_size
    weights = QuantizationArgs(num_bits=scheme.bits, type=kind, symmetric=scheme.symmetric, group_size=size)
    if scheme.activations == "none":
        return {"weights": weights}
    strategy = "token" if scheme.activations == "dynamic" else "tensor"
    inputs = QuantizationArgs(type=kind, dynamic=scheme.activations == "dynamic", strategy=strategy)
    return {"weights": weights, "input_activations": inputs}


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
def test_configs_the_library_writes(scheme: Scheme) -> None:
    group = QuantizationScheme(targets=["Linear"], **library_args(scheme))
    config = QuantizationConfig(config_groups={"group_0": group}, format="mixed-precision", ignore=["re:.*head"])
    form = parse(config.to_dict())
    assert form.scheme_of(UP, set()) == scheme
    assert form.scheme_of("lm_head", set()) is None


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize("kv_scales", [False, True])
def test_configs_the_library_reads(scheme: Scheme, kv_scales: bool) -> None:
    form = CompressedTensors.plan(scheme, ["lm_head", UP], kv_scales=kv_scales)
    config = QuantizationConfig.model_validate(json.loads(json.dumps(form.config())))
    assert config.quantization_status == "compressed"
    assert config.ignore == ["lm_head", UP]
    assert (config.kv_cache_scheme is not None) == kv_scales
    (group,) = config.config_groups.values()
    assert isinstance(group, QuantizationScheme)
    assert group.format == config.format
    for name, expected in library_args(scheme).items():
        args = getattr(group, name)
        for key in ("num_bits", "type", "symmetric", "strategy", "dynamic", "actorder"):
            assert getattr(args, key) == getattr(expected, key), (name, key)
        assert (args.group_size or -1) == (expected.group_size or -1)
    assert form.scheme_of(UP, set()) is None
    assert form.scheme_of("model.layers.1.mlp.up_proj", set()) == scheme


def test_groups_are_chosen_as_the_library_chooses() -> None:
    """By name, then by the alphabetically first pattern, then by class; ignored layers are plain."""
    names = [
        f"model.layers.{layer}.{part}_proj"
        for layer in range(4)
        for part in ("self_attn.q", "self_attn.k", "self_attn.o", "mlp.up", "mlp.gate", "mlp.down")
    ]
    model = torch.nn.Module()
    for name in ("lm_head", *names):
        owner = model
        *parents, last = name.split(".")
        for parent in parents:
            if not hasattr(owner, parent):
                owner.add_module(parent, torch.nn.Module())
            owner = owner.get_submodule(parent)
        owner.add_module(last, torch.nn.Linear(32, 8))
    apply_quantization_config(model, QuantizationConfig.model_validate(MIXED), show_progress=False)
    form, seen = parse(MIXED), set()
    for name in ("lm_head", *names):
        theirs = getattr(model.get_submodule(name), "quantization_scheme", None)
        ours = form.scheme_of(name, set())
        seen.add(ours)
        if theirs is None:
            assert ours is None, name
        else:
            assert ours is not None, name
            assert (ours.bits, ours.kind == "fp8") == (theirs.weights.num_bits, theirs.weights.type == "float"), name
            assert ours.group_size == (None if theirs.weights.group_size in (None, -1) else theirs.weights.group_size)
    assert len(seen) == 4


def test_layers_no_group_names_are_plain() -> None:
    form = parse(changed(W4A16, "targets", ["re:.*up_proj"]))
    assert form.scheme_of(UP, set()) is not None
    assert form.scheme_of("model.layers.0.mlp.down_proj", set()) is None


def test_scales_of_a_key_value_cache_are_harmless() -> None:
    form = parse(FP8_STATIC_KV)
    for key in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.v_proj.output_scale"):
        assert form.is_harmless(f"model.layers.3.{key}")
        assert not parse(W4A16).is_harmless(f"model.layers.3.{key}")
    for key in ("self_attn.k_proj.weight_scale", "self_attn.q_proj.output_scale", "mlp.k_scale"):
        assert not form.is_harmless(f"model.layers.3.{key}")
    assert CompressedTensors.plan(Scheme(4), [], kv_scales=True).is_harmless("model.layers.0.self_attn.k_scale")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (changed(W4A16, "/config_groups", {}), "config_groups must have at least one group"),
        (changed(W4A16, "/config_groups", {"W4A16": ["Linear"]}), "config_groups.W4A16 must be an object"),
        (changed(W4A16, "weights", None), "config_groups.group_0.weights is missing"),
        (changed(W4A16, "weights.num_bits", 3), "config_groups.group_0.weights.num_bits 3 of type 'int'"),
        (changed(FP8_DYNAMIC, "weights.num_bits", 4), "config_groups.group_0.weights.num_bits 4 of type 'float'"),
        (changed(W4A16, "weights.dynamic", True), "config_groups.group_0.weights.dynamic must be false"),
        (changed(W4A16, "weights.strategy", "block"), "config_groups.group_0.weights.strategy 'block'"),
        (changed(FP8_DYNAMIC, "weights.strategy", "block"), "config_groups.group_0.weights.strategy 'block'"),
        (changed(W4A16, "weights.strategy", "tensor_group"), "config_groups.group_0.weights.strategy 'tensor_group'"),
        (changed(W4A16, "weights.group_size", None), "config_groups.group_0.weights.strategy 'group'"),
        (changed(FP8_DYNAMIC, "weights.group_size", 64), "config_groups.group_0.weights.strategy 'channel'"),
        (changed(W4A16, "weights.actorder", "random"), "config_groups.group_0.weights.actorder must be"),
        (changed(FP8_DYNAMIC, "weights.symmetric", False), "config_groups.group_0.weights.symmetric must be true"),
        (
            changed(W4A16, "input_activations", W8A8["config_groups"]["group_0"]["input_activations"]),
            "config_groups.group_0.input_activations is set, which needs 8-bit weights",
        ),
        (
            changed(W8A8, "output_activations", W8A8["config_groups"]["group_0"]["input_activations"]),
            "config_groups.group_0.output_activations is set",
        ),
        (changed(W8A8, "input_activations.num_bits", 4), "config_groups.group_0.input_activations.num_bits 4"),
        (changed(W8A8, "input_activations.type", "float"), "config_groups.group_0.input_activations.type must be int"),
        (changed(W8A8, "input_activations.symmetric", False), "config_groups.group_0.input_activations.symmetric"),
        (changed(W8A8, "input_activations.dynamic", "local"), "config_groups.group_0.input_activations.dynamic"),
        (changed(W8A8, "input_activations.dynamic", False), "config_groups.group_0.input_activations.strategy 'token'"),
        (changed(W8A8, "input_activations.strategy", "group"), "config_groups.group_0.input_activations.strategy"),
        (changed(W4A16, "targets", ["LlamaAttention"]), "config_groups.group_0.targets names the class"),
        (changed(W4A16, "targets", "Linear"), "config_groups.group_0.targets must be a list of strings"),
        (changed(W4A16, "targets", ["re:*"]), "config_groups.group_0.targets has the invalid regular expression"),
        (changed(W4A16, "/ignore", ["re:("]), "ignore has the invalid regular expression"),
        (changed(W4A16, "/format", "marlin-24"), "format 'marlin-24' is not supported for w4a16; it must be pack-"),
        (changed(W4A16, "/format", "int-quantized"), "format 'int-quantized' is not supported for w4a16"),
        (changed(W8A8, "/format", "pack-quantized"), "format 'pack-quantized' is not supported for w8a8"),
        (changed(W4A16, "format", "nvfp4-pack-quantized"), "config_groups.group_0.format 'nvfp4-pack-quantized'"),
        (changed(W8A8, "/sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config is set"),
        (changed(W8A8, "/transform_config", {"config_groups": {"u": {}}}), "transform_config is set"),
        (changed(W8A8, "/kv_cache_scheme", "fp8"), "kv_cache_scheme must be an object"),
    ],
)
def test_configs_that_are_refused(values: Config, says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(values)
    assert str(caught.value).startswith(f"config.json: quantization_config.{says}")
    assert "\n" not in str(caught.value)


def test_equal_schemes_stored_in_two_ways_are_refused() -> None:
    values = copy.deepcopy(FP8_DYNAMIC)
    second = copy.deepcopy(values["config_groups"]["group_0"])
    second["weights"]["strategy"], second["targets"] = "tensor", ["re:.*down_proj"]
    values["config_groups"]["group_1"] = second
    with pytest.raises(CheckpointError, match="config_groups stores equal schemes in two ways"):
        parse(values)


@pytest.mark.parametrize(
    "scheme",
    [
        Scheme(3),
        Scheme(4, "fp8"),
        Scheme(8, "fp8", 64),
        Scheme(8, "fp8", symmetric=False),
        Scheme(4, activations="dynamic"),
        Scheme(8, "int", 64, activations="dynamic"),
    ],
)
def test_plans_that_are_refused(scheme: Scheme) -> None:
    assert CompressedTensors.refusal(scheme) is not None
    with pytest.raises(ConfigError, match="--format compressed-tensors cannot hold"):
        CompressedTensors.plan(scheme, [])


def test_scales_keep_the_type_of_the_model() -> None:
    form = CompressedTensors.plan(Scheme(4), [])
    assert [form.scale_dtype(dtype) for dtype in DTYPES] == list(DTYPES)
