"""What is read from config.json and generation_config.json, in old and new spellings."""

import json

import pytest
import torch

from bladellm_runtime.models.config import read_generation_defaults, read_model_spec
from tests.models.harness import save_tiny

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 50,
    "max_position_embeddings": 128,
}


def read(folder, generation=None, **changes):
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model_spec(folder)


def test_defaults_of_missing_fields(tmp_path):
    spec = read(tmp_path)
    assert (spec.kv_heads, spec.head_dim, spec.rms_norm_eps) == (4, 16, 1e-6)
    assert (spec.rope.type, spec.rope.theta, spec.dtype) == ("default", 10_000.0, torch.float32)
    assert not any((spec.tie_word_embeddings, spec.qkv_bias, spec.output_bias, spec.mlp_bias, spec.qk_norm))
    assert spec.windows == (None, None)
    assert spec.eos_token_ids == ()


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_family_by_model_type_where_architectures_are_missing(tmp_path, model_type):
    spec = read(tmp_path, architectures=..., model_type=model_type)
    assert spec.architecture.lower().startswith(model_type)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "torch.bfloat16"])
def test_dtype_in_both_spellings(tmp_path, key, name):
    assert read(tmp_path, **{key: name}).dtype == getattr(torch, name.removeprefix("torch."))


def test_old_and_new_rope_spellings_are_the_same(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    new = read(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling})
    assert new == read(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling})
    assert new == read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling})
    assert new.rope.factor == 8.0


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 128),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 2.5}, 320),
        ({"rope_type": "yarn", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "original_max_position_embeddings": 32}, 128),
    ],
    ids=str,
)
def test_longest_sequence_counts_scaling(tmp_path, scaling, longest):
    assert read(tmp_path, rope_scaling=scaling).max_position_embeddings == longest


def test_end_tokens_of_both_files(tmp_path):
    assert read(tmp_path, eos_token_id=3).eos_token_ids == (3,)
    assert read(tmp_path, generation={"eos_token_id": [7, 3]}, eos_token_id=5).eos_token_ids == (7, 3, 5)
    assert read(tmp_path, generation={"eos_token_id": 7}, eos_token_id=[7, 1]).eos_token_ids == (7, 1)
    assert read(tmp_path, generation={"eos_token_id": None}, eos_token_id=None).eos_token_ids == ()


def test_generation_defaults(tmp_path):
    assert read_generation_defaults(tmp_path) == {}
    values = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None, "bos_token_id": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_generation_defaults(tmp_path) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


def test_windows_by_layer(tmp_path):
    qwen = {"architectures": ["Qwen2ForCausalLM"], "num_hidden_layers": 4, "sliding_window": 8, "max_window_layers": 3}
    assert read(tmp_path, **qwen).windows == (None,) * 4
    assert read(tmp_path, use_sliding_window=True, **qwen).windows == (None, None, None, 8)
    types = ["sliding_attention", "full_attention"] * 2
    assert read(tmp_path, use_sliding_window=True, layer_types=types, **qwen).windows == (8, None, 8, None)
    assert read(tmp_path, use_sliding_window=True, **{**qwen, "sliding_window": None}).windows == (None,) * 4
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert read(tmp_path, sliding_window=8, **mistral).windows == (8, 8)
    assert read(tmp_path, sliding_window=None, **mistral).windows == (None, None)


def test_the_demo_model(demo_model):
    spec = read_model_spec(demo_model)
    assert (spec.layers, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab_size) == (4, 6, 2, 32, 8192)
    assert spec.eos_token_ids == (2, 0)
    assert spec.dtype == torch.bfloat16
    assert read_generation_defaults(demo_model) == {}


def test_qwen3_head_dim_default_is_its_own(tmp_path):
    assert read(tmp_path, architectures=["Qwen3ForCausalLM"]).head_dim == 128


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_what_transformers_saves_is_read(tmp_path, family):
    model = save_tiny(tmp_path, family)
    spec, config = read_model_spec(tmp_path), model.config
    assert spec.architecture == type(model).__name__
    assert spec.rms_norm_eps == config.rms_norm_eps
    assert spec.rope.theta == config.rope_parameters["rope_theta"]
    assert spec.max_position_embeddings == config.max_position_embeddings
