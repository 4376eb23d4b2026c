"""GPTQ layers and configs, against a slow reading of the format and configs as they are found on hubs."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.quantization.gptq import Gptq
from bladellm_runtime.quantization.scheme import Scheme
from tests.quantization.reference import assert_same, bits_of, fields, gptq_weight, random_weight

AUTOGPTQ = {
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "dataset": None,
    "desc_act": True,
    "disable_exllama": False,
    "exllama_config": {"version": 1},
    "group_size": 128,
    "max_input_length": None,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "quant_method": "gptq",
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
    "use_cuda_fp16": False,
}
GPTQMODEL = {
    "bits": 4,
    "checkpoint_format": "gptq",
    "desc_act": False,
    "dynamic": {
        r"-:.*\.self_attn\.o_proj": {},
        r"+:model\.layers\.(?:1|3)\.mlp\..*": {"bits": 8, "group_size": 64, "mse": 2.4},
        r".*\.2\..*up_proj": {"sym": False, "group_size": -1},
    },
    "group_size": 32,
    "hyb_act": False,
    "lm_head": False,
    "meta": {"quantizer": ["gptqmodel:4.1.0"], "damp_percent": 0.05, "static_groups": False, "true_sequential": True},
    "pack_dtype": "int32",
    "quant_method": "gptq",
    "sym": True,
}


def parse(**changes: Any) -> Gptq:
    return Gptq.parse(fields({"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True} | changes))


def stored(scheme: Scheme, **changes: Any) -> Gptq:
    """The format of a checkpoint all of whose layers have a scheme."""
    size = -1 if scheme.group_size is None else scheme.group_size
    return parse(bits=scheme.bits, group_size=size, sym=scheme.symmetric, **changes)


def random_tensors(
    scheme: Scheme, rows: int, columns: int, v1: bool, scrambled: bool = False
) -> dict[str, torch.Tensor]:
    """A layer of random words, as another tool may have written it."""
    groups, bits = scheme.groups(columns), scheme.bits
    words = {"qweight": (columns * bits // 32, rows), "qzeros": (groups, rows * bits // 32)}
    tensors = {name: torch.randint(-(2**31), 2**31, shape, dtype=torch.int32) for name, shape in words.items()}
    if v1 and bits == 8:
        tensors["qzeros"] &= 0x7F7F7F7F
    if scheme.symmetric:
        middle = scheme.middle - (1 if v1 else 0)
        word = sum(middle << slot * bits for slot in range(32 // bits))
        tensors["qzeros"].fill_(word - 2**32 if word >= 2**31 else word)
    tensors["scales"] = torch.randn(groups, rows).half()
    tensors["g_idx"] = torch.arange(columns, dtype=torch.int32) // (columns // groups)
    if scrambled:
        tensors["g_idx"] = tensors["g_idx"][torch.randperm(columns)]
    return tensors


LAYERS = st.tuples(
    st.sampled_from((4, 8)), st.booleans(), st.sampled_from((None, 8, 24, 32)), st.booleans(), st.integers(1, 5)
)


@settings(deadline=None, max_examples=60)
@given(LAYERS, st.sampled_from(("gptq", "gptq_v2")))
def test_weights_are_what_the_specification_says(layer: tuple[Any, ...], version: str) -> None:
    bits, symmetric, group_size, scrambled, n = layer
    scheme, rows, columns, v1 = Scheme(bits, "int", group_size, symmetric), n * 8, 96, version == "gptq"
    tensors = random_tensors(scheme, rows, columns, v1, scrambled)
    form = stored(scheme, checkpoint_format=version, desc_act=scrambled)
    for entry in form.tensors(scheme, rows, columns):
        assert tuple(tensors[entry.suffix].shape) == entry.shape
    weight = form.unpack(scheme, rows, columns, tensors)
    assert torch.equal(weight.dequantize(), torch.from_numpy(gptq_weight(tensors, bits, v1)).float())
    assert (weight.zeros is None) == symmetric
    assert all(part is None or part.is_contiguous() for part in (weight.codes, weight.scales, weight.zeros))
    for name, tensor in form.pack(weight).items():
        assert torch.equal(tensor, tensors[name]), name
        assert tensor.dtype == tensors[name].dtype


@pytest.mark.parametrize("scrambled", [False, True])
@pytest.mark.parametrize("scheme", [Scheme(4, "int", 16), Scheme(8, "int", None), Scheme(4, "int", 48, False)])
def test_new_checkpoints_read_back(scheme: Scheme, scrambled: bool, device: str) -> None:
    form = Gptq.plan(scheme, ["lm_head"], scrambled=scrambled)
    scrambled = scrambled and scheme.group_size is not None
    weight = random_weight(scheme, 24, 96, scrambled=scrambled, lowest_zero=Gptq.lowest_zero, device=device)
    tensors = form.pack(weight)
    table = {entry.suffix: entry.shape for entry in form.tensors(scheme, 24, 96)}
    assert table == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    again = Gptq.parse(fields(json.loads(json.dumps(form.config()))))
    assert again.scheme_of("model.layers.0.mlp.up_proj", set()) == scheme
    assert_same(weight, again.unpack(scheme, 24, 96, tensors))


def test_a_weight_without_groups_forgets_its_order() -> None:
    scheme = Scheme(4)
    weight = random_weight(scheme, 8, 32)
    ordered = type(weight)(scheme, weight.codes, weight.scales, None, torch.randperm(32))
    form = Gptq.plan(scheme, [])
    back = form.unpack(scheme, 8, 32, form.pack(ordered))
    assert back.order is None
    assert torch.equal(back.dequantize(), ordered.dequantize())


def test_the_words_of_symmetric_zero_points() -> None:
    """The constants every symmetric checkpoint shows."""
    for bits, v1, word in (
        (4, True, 0x77777777),
        (4, False, 0x88888888),
        (8, True, 0x7F7F7F7F),
        (8, False, 0x80808080),
    ):
        scheme = Scheme(bits, "int", 8)
        form = stored(scheme, checkpoint_format="gptq" if v1 else "gptq_v2")
        qzeros = form.pack(random_weight(scheme, 16, 24))["qzeros"]
        assert {value % 2**32 for value in qzeros.flatten().tolist()} == {word}


def test_the_highest_stored_zero_point_of_the_first_version_is_16() -> None:
    scheme = Scheme(4, "int", 8, symmetric=False)
    tensors = random_tensors(scheme, 8, 8, v1=True)
    tensors["qzeros"].fill_(-1)
    weight = stored(scheme).unpack(scheme, 8, 8, tensors)
    assert weight.zeros is not None
    assert weight.zeros.unique().tolist() == [16]
    assert torch.equal(stored(scheme).pack(weight)["qzeros"], tensors["qzeros"])


def test_a_zero_point_the_first_version_cannot_hold_is_refused() -> None:
    scheme = Scheme(4, "int", 8, symmetric=False)
    weight = random_weight(scheme, 8, 8)
    assert weight.zeros is not None
    weight.zeros[3, 0] = 0
    with pytest.raises(CheckpointError, match="zero point 0"):
        Gptq.plan(scheme, []).pack(weight)
    packed = stored(scheme, checkpoint_format="gptq_v2").pack(weight)["qzeros"]
    assert bits_of(packed[0, 0].item(), 3, 4) == 0


def test_a_stored_256_is_refused() -> None:
    scheme = Scheme(8, "int", 8, symmetric=False)
    tensors = random_tensors(scheme, 8, 8, v1=True)
    tensors["qzeros"][0, 1] = -1
    with pytest.raises(CheckpointError, match=r"^qzeros .*256"):
        stored(scheme).unpack(scheme, 8, 8, tensors)


def test_biases_of_layers_without_one_are_harmless() -> None:
    assert parse().is_harmless("model.layers.0.self_attn.q_proj.bias")
    assert not parse().is_harmless("model.layers.0.self_attn.q_proj.weight")
    assert not parse().is_harmless("model.norm.bias")


def test_a_layer_without_g_idx_and_zero_points() -> None:
    scheme = Scheme(4, "int", 16)
    tensors = random_tensors(scheme, 16, 32, v1=True)
    expected = gptq_weight(tensors, 4, v1=True)
    form = stored(scheme)
    optional = {entry.suffix for entry in form.tensors(scheme, 16, 32) if not entry.required}
    assert optional == {"g_idx", "qzeros"}
    weight = form.unpack(scheme, 16, 32, {name: tensors[name] for name in ("qweight", "scales")})
    np.testing.assert_array_equal(weight.dequantize().numpy(), expected.astype(np.float32))


def test_act_order_needs_its_g_idx() -> None:
    required = {entry.suffix: entry.required for entry in parse(desc_act=True).tensors(Scheme(4, "int", 32), 8, 64)}
    assert required == {"qweight": True, "qzeros": False, "scales": True, "g_idx": True}


@pytest.mark.parametrize(
    ("name", "spoil", "says"),
    [
        ("g_idx", lambda t: t.__setitem__(3, 4), "g_idx must hold groups from 0 to 3"),
        ("g_idx", lambda t: t.__setitem__(3, -1), "g_idx must hold groups from 0 to 3"),
        ("g_idx", lambda t: t.__setitem__(3, 1), "g_idx has groups of unequal sizes"),
        ("scales", lambda t: t.__setitem__((0, 5), float("nan")), "scales has NaN or infinite values"),
        ("scales", lambda t: t.__setitem__((0, 5), float("-inf")), "scales has NaN or infinite values"),
        ("qzeros", lambda t: t.__setitem__((1, 1), 0x77777677), "qzeros has zero points other than 8"),
    ],
)
def test_bad_values_are_refused(name: str, spoil: Any, says: str) -> None:
    scheme = Scheme(4, "int", 16)
    tensors = random_tensors(scheme, 16, 64, v1=True)
    spoil(tensors[name])
    with pytest.raises(CheckpointError, match=f"^{says}"):
        stored(scheme).unpack(scheme, 16, 64, tensors)


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "says"),
    [(12, 64, 4, "12 outputs"), (16, 68, 4, "68 inputs"), (6, 64, 8, "6 outputs"), (16, 48, 4, "group size 32")],
)
def test_shapes_that_cannot_be_stored(rows: int, columns: int, bits: int, says: str) -> None:
    scheme = Scheme(bits, "int", None if "group" not in says else 32)
    with pytest.raises(CheckpointError, match=f"^qweight has .*{says}"):
        stored(scheme).tensors(scheme, rows, columns)


def test_an_autogptq_config() -> None:
    form = Gptq.parse(fields(AUTOGPTQ))
    assert form.scheme_of("model.layers.0.self_attn.q_proj", set()) == Scheme(4, "int", 128)
    assert form.scheme_of("lm_head", set()) is None
    assert form.config() == AUTOGPTQ
    assert form.lowest_zero == 1


def test_dynamic_rules_of_a_gptqmodel_config() -> None:
    form = Gptq.parse(fields(GPTQMODEL))
    base = Scheme(4, "int", 32)
    for module, expected in {
        "model.layers.0.self_attn.q_proj": base,
        "model.layers.1.self_attn.o_proj": None,
        "model.layers.1.mlp.up_proj": Scheme(8, "int", 64),
        "model.layers.11.mlp.up_proj": base,
        "model.layers.2.mlp.up_proj": Scheme(4, "int", None, symmetric=False),
        "model.layers.2.mlp.gate_proj": base,
        "lm_head": None,
    }.items():
        assert form.scheme_of(module, set()) == expected, module


def test_the_first_rule_that_matches_wins() -> None:
    form = parse(dynamic={r"+:.*up": {"bits": 8}, r"-:.*up_proj": {}, r"-:model\.layers\.0\.": {}})
    assert form.scheme_of("model.layers.0.mlp.up_proj", set()) == Scheme(8, "int", 32)
    assert form.scheme_of("model.layers.0.mlp.gate_proj", set()) is None
    assert form.scheme_of("a.model.layers.0.mlp.gate_proj", set()) is not None


def test_the_tensors_decide_where_there_are_any() -> None:
    form = parse(dynamic={r"-:.*down_proj": {}})
    keys = {"a.up_proj.weight", "a.down_proj.qweight", "lm_head.qweight", "a.o_proj.qweight"}
    assert form.scheme_of("a.up_proj", keys) is None
    assert form.scheme_of("a.down_proj", keys) == Scheme(4, "int", 32)
    assert form.scheme_of("lm_head", keys) == Scheme(4, "int", 32)
    assert form.scheme_of("a.o_proj", keys) == Scheme(4, "int", 32)
    assert form.scheme_of("a.absent_proj", keys) == Scheme(4, "int", 32)


@pytest.mark.parametrize("modules", [["self_attn.q_proj", "mlp.up_proj"], [["self_attn.q_proj"], ["mlp.up_proj"]]])
def test_modules_in_block_to_quantize(modules: Any) -> None:
    form = parse(modules_in_block_to_quantize=modules)
    assert form.scheme_of("model.layers.0.self_attn.q_proj", set()) is not None
    assert form.scheme_of("model.layers.0.mlp.up_proj", set()) is not None
    assert form.scheme_of("model.layers.0.mlp.gate_up_proj", set()) is None
    assert form.scheme_of("model.layers.0.self_attn.k_proj", set()) is None


def test_a_quantized_output_layer() -> None:
    assert parse(lm_head=True).scheme_of("lm_head", set()) == Scheme(4, "int", 32)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"bits": 3}, "bits 3 is not supported; it must be 4 or 8"),
        ({"bits": "4"}, "bits must be a whole number"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": 0}, "group_size must be -1 or positive"),
        ({"group_size": None}, "group_size is missing"),
        ({"sym": 1}, "sym must be true or false"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; it must be gptq or gptq_v2"),
        ({"format": "bitblas"}, "format 'bitblas' is not supported"),
        ({"is_marlin_format": True}, "is_marlin_format is true"),
        ({"pack_dtype": "int16"}, "pack_dtype 'int16' is not supported; it must be int32"),
        ({"dynamic": {"+:.*": {"bits": 2}}}, "dynamic.+:.*.bits 2 is not supported"),
        ({"dynamic": {"-:(": {}}}, "dynamic has the invalid regular expression '('"),
        ({"dynamic": [1]}, "dynamic must be an object"),
        ({"modules_in_block_to_quantize": [[1]]}, "modules_in_block_to_quantize must be a list"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        parse(**changes)
    assert str(caught.value).startswith(f"config.json: quantization_config.{says}")
    assert "\n" not in str(caught.value)


def test_new_configs_name_the_plain_layers_as_servers_fuse_them() -> None:
    """vLLM asks for the fused layer's name, and matches expressions from the start of names."""
    ignore = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"] + ["model.layers.1.mlp.gate_proj", "lm_head"]
    config = Gptq.plan(Scheme(4, "int", 128), ignore).config()
    assert {key: config[key] for key in ("quant_method", "checkpoint_format", "bits", "group_size")} == {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": 4,
        "group_size": 128,
    }
    assert config["sym"] is True
    assert config["desc_act"] is False
    assert config["lm_head"] is False
    form = Gptq.parse(fields(json.loads(json.dumps(config))))
    for module in (*ignore, "model.layers.1.self_attn.qkv_proj"):
        assert form.scheme_of(module, set()) is None, module
    for module in ("model.layers.11.self_attn.q_proj", "model.layers.1.mlp.gate_up_proj", "model.layers.1.mlp.up_proj"):
        assert form.scheme_of(module, set()) is not None, module


def test_ignored_names_are_whole_and_literal() -> None:
    form = Gptq.plan(Scheme(4), ["model.layers.1.mlp.gate"])
    assert form.scheme_of("model.layers.1.mlp.gate", set()) is None
    assert form.scheme_of("model.layers.1.mlp.gate_proj", set()) is not None
    assert form.scheme_of("model.layers.1xmlp.gate", set()) is not None


def test_plans_that_are_refused() -> None:
    for scheme in (Scheme(8, "fp8"), Scheme(8, activations="dynamic"), Scheme(3)):
        assert Gptq.refusal(scheme) is not None
        with pytest.raises(ConfigError, match="--format gptq cannot hold"):
            Gptq.plan(scheme, [])
    with pytest.raises(ConfigError, match="--kv_scales needs --format compressed-tensors"):
        Gptq.plan(Scheme(4), [], kv_scales=True)
    assert Gptq.refusal(Scheme(4, "int", 64, symmetric=False)) is None
    assert Gptq.plan(Scheme(4, "int", 64), [], scrambled=True).config()["desc_act"] is True
    assert Gptq.plan(Scheme(4), []).scale_dtype(torch.bfloat16) == torch.float16
