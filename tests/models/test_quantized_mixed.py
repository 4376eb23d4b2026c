"""Checkpoints that mix: parts of a fused layer that differ, scrambled inputs, quantized heads, shards, dummies."""

import logging

import pytest
import torch

from bladellm_runtime.layers.linear import Linear, StackedLinear
from bladellm_runtime.layers.quantized_linear import QuantizedLinear
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.quantization.registry import FORMATS
from bladellm_runtime.quantization.scheme import Scheme
from tests.models.harness import DEVICES, Sequences, load_tiny, random_prompt
from tests.models.quantized import SCHEMES, Tiny, assert_agrees, edit_tensors, plan, shard
from tests.support.cases import some_pairs

LAYER = "model.layers.{}.{}"
W4, W4_ASYMMETRIC, W8 = SCHEMES["w4 g16"], SCHEMES["w4 g16 asymmetric"], SCHEMES["w8 g16"]
W8A8_STATIC, FP8_STATIC = SCHEMES["w8a8 static"], SCHEMES["fp8 static"]


def assert_equal(tiny, device="cpu"):
    """Load, compare logits with those of the reference, and return the model."""
    model = load_tiny(tiny.folder, device)
    assert_agrees(tiny, model)
    return model


def kinds(layer):
    """The kinds of pieces of a fused layer, in order."""
    return [type(piece) for piece in (layer.pieces if isinstance(layer, StackedLinear) else [layer])]


def targeting(**schemes: Scheme) -> dict:
    """A compressed-tensors config with a group for every regular expression of module names."""
    config: dict = {}
    for number, (ending, scheme) in enumerate(schemes.items()):
        one = plan("compressed-tensors", scheme)
        group = {**one["config_groups"]["group_0"], "targets": [f"re:.*{ending}$"]}
        config = config or {**one, "config_groups": {}}
        config["config_groups"][f"group_{number}"] = group
    return {**config, "format": "mixed-precision"}


PLAIN_PARTS = {
    "q": [Linear, QuantizedLinear],
    "k": [QuantizedLinear, Linear, QuantizedLinear],
    "v": [QuantizedLinear, Linear],
    "qk": [Linear, QuantizedLinear],
    "qkv": [Linear],
}
"""The layers that a fused one is made of where these parts are plain."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("plain", "method"), some_pairs(PLAIN_PARTS, FORMATS))
def test_plain_parts_of_a_fused_layer(tmp_path, method, plain, device):
    ignore = ["lm_head", *(LAYER.format(1, f"self_attn.{one}_proj") for one in plain)]
    tiny = Tiny(tmp_path, plan(method, W4, ignore), "qwen2")
    model = assert_equal(tiny, device)
    assert kinds(model.layers[1].attention.qkv) == PLAIN_PARTS[plain]
    assert kinds(model.layers[0].attention.qkv) == [QuantizedLinear]


@pytest.mark.parametrize("device", DEVICES)
def test_schemes_that_differ_within_a_fused_layer(tmp_path, device):
    config = targeting(q_proj=W4, k_proj=W8, v_proj=W8, gate_proj=W4_ASYMMETRIC, up_proj=W4, o_proj=W8)
    model = assert_equal(Tiny(tmp_path, config, "qwen2"), device)
    assert kinds(model.layers[0].attention.qkv) == [QuantizedLinear] * 2
    assert kinds(model.layers[0].mlp.gate_up) == [QuantizedLinear] * 2
    assert kinds(model.layers[0].mlp.down) == [Linear]


@pytest.mark.parametrize("device", DEVICES)
def test_integers_and_floats_in_one_model(tmp_path, device):
    config = targeting(**{"[qkv]_proj": W8A8_STATIC, "o_proj": SCHEMES["fp8 dynamic"], "mlp.*_proj": FP8_STATIC})
    assert_equal(Tiny(tmp_path, config, "qwen3", head_dim=16), device)


@pytest.mark.parametrize("device", DEVICES)
def test_schemes_that_differ_by_layer(tmp_path, device):
    config = plan("gptq", W4)
    config["dynamic"] = {r"+:.*\.1\..*": {"bits": 8, "group_size": 8}, r"-:.*\.2\.mlp.*": {}}
    model = assert_equal(Tiny(tmp_path, config), device)
    schemes = [model.layers[layer].attention.qkv.scheme for layer in range(3)]
    assert schemes == [W4, Scheme(8, group_size=8), W4]
    assert isinstance(model.layers[2].mlp.down, Linear)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", [W8A8_STATIC, FP8_STATIC], ids=["int8", "fp8"])
def test_static_scales_that_differ_are_kept_apart(tmp_path, scheme, device):
    scales = {LAYER.format(0, "self_attn.k_proj"): 0.02, LAYER.format(0, "mlp.up_proj"): 0.3}
    tiny = Tiny(tmp_path, plan("compressed-tensors", scheme), input_scales=scales)
    model = assert_equal(tiny, device)
    assert [len(kinds(model.layers[0].attention.qkv)), len(kinds(model.layers[0].mlp.gate_up))] == [3, 2]
    assert kinds(model.layers[1].attention.qkv) == [QuantizedLinear]


SCHEMES_OF_GROUPS = {"w4": W4, "w4 asymmetric": W4_ASYMMETRIC, "w8": W8}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "where"), some_pairs(SCHEMES_OF_GROUPS, ["down_proj", "q_proj", "_proj"]))
def test_scrambled_groups(tmp_path, name, where, device):
    tiny = Tiny(tmp_path, plan("gptq", SCHEMES_OF_GROUPS[name], scrambled=True), "qwen2", scrambled=(where,))
    model = assert_equal(tiny, device)
    assert (model.layers[0].mlp.down.order is not None) == (where != "q_proj")


@pytest.mark.parametrize("device", DEVICES)
def test_scrambled_groups_of_compressed_tensors(tmp_path, device):
    config = plan("compressed-tensors", W4)
    config["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    assert_equal(Tiny(tmp_path, config, scrambled=("_proj",)), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", list(FORMATS))
def test_quantized_head(tmp_path, method, device):
    model = assert_equal(Tiny(tmp_path, plan(method, W4, ()), head=method == "awq"), device)
    assert isinstance(model.head, QuantizedLinear)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore", [("lm_head",), ()], ids=["named", "not named"])
@pytest.mark.parametrize("method", list(FORMATS))
def test_tied_embeddings_stay_plain(tmp_path, method, ignore, device):
    tiny = Tiny(tmp_path, plan(method, W4, ignore), tie_word_embeddings=True)
    model = assert_equal(tiny, device)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("method", list(FORMATS))
def test_shards(tmp_path, method):
    tiny = Tiny(tmp_path, plan(method, W4_ASYMMETRIC), "qwen2")
    shard(tmp_path, 5)
    assert_equal(tiny)


def test_scales_of_a_kv_cache_are_said_to_be_unused(tmp_path, caplog):
    tiny = Tiny(tmp_path, plan("compressed-tensors", W4, kv_scales=True))
    scales = {f"model.layers.{i}.self_attn.{which}_scale": torch.ones(1) for i in range(3) for which in "kv"}
    edit_tensors(tmp_path, lambda tensors: tensors.update(scales))
    with caplog.at_level(logging.INFO):
        assert_equal(tiny)
    assert [record.message for record in caplog.records if "KV cache is not quantized" in record.message]


def test_biases_of_zeros_that_some_quantizers_write(tmp_path):
    tiny = Tiny(tmp_path, plan("gptq", W4))
    zeros = {f"{name}.bias": torch.zeros(weight.rows) for name, weight in tiny.weights.items()}
    edit_tensors(tmp_path, lambda tensors: tensors.update(zeros))
    assert_equal(tiny)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("method", "name"), [("compressed-tensors", name) for name in SCHEMES] + [("gptq", "w4 g16")])
def test_dummy_weights_are_seeded_and_sensible(tmp_path, method, name, device):
    Tiny(tmp_path, plan(method, SCHEMES[name]), "llama", num_hidden_layers=4)
    (tmp_path / "model.safetensors").unlink()
    spec = read_model_spec(tmp_path)

    def load(seed):
        return load_model(
            tmp_path, spec, device=torch.device(device), dtype=torch.float32, load_format="dummy", seed=seed
        )

    first, again, other = load(3), load(3), load(2**63 - 1)
    prompt = random_prompt(21)
    logits = Sequences(first).step([(0, prompt)])[0]
    assert torch.equal(logits, Sequences(again).step([(0, prompt)])[0])
    assert not torch.equal(logits, Sequences(other).step([(0, prompt)])[0])
    assert 0.1 < logits.std() < 10
    assert first.layers[0].mlp.down.scheme == SCHEMES[name]
    x = torch.randn(64, 64, device=device)
    down = [layer.mlp.down(x) for layer in first.layers[:2]]
    assert 0.5 < down[0].std() < 2
    assert not torch.equal(*down)
    gate, up = first.layers[0].mlp.gate_up(x[:, :48]).chunk(2, dim=1)
    assert not torch.equal(gate, up)
