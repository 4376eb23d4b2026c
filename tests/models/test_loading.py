"""Loading: shards, types, dummy weights, and the memory it takes."""

import json

import pytest
import torch
import transformers

from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.loading import load_model
from bladellm_runtime.models.weights import parameter_shape, weight_table
from tests.models.harness import (
    DEVICES,
    Sequences,
    assert_greedy,
    load_tiny,
    random_prompt,
    reference_logits,
    save_tiny,
)


def load_dummy(folder, seed, device="cpu", dtype=torch.float32):
    spec = read_model_spec(folder)
    return load_model(folder, spec, device=torch.device(device), dtype=dtype, load_format="dummy", seed=seed)


def test_shards_load_as_one_file_does(tmp_path):
    reference = save_tiny(tmp_path, "qwen3", head_dim=16, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3
    prompt = random_prompt(17)
    logits = Sequences(load_tiny(tmp_path)).step([(0, prompt)])[0]
    assert (logits - reference_logits(reference, prompt)).abs().max() <= 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_type_and_device_are_those_asked_for(tmp_path, dtype, device):
    reference = save_tiny(tmp_path, "qwen2", tie_word_embeddings=True)
    model = load_tiny(tmp_path, device, dtype)
    assert (model.dtype, model.device.type) == (dtype, device)
    assert model.weight_bytes == sum(p.numel() for p in reference.parameters()) * dtype.itemsize
    qkv = model.layers[1].attention.qkv
    expected = reference.model.layers[1].self_attn.k_proj
    assert torch.equal(qkv.weight[48:64].cpu(), expected.weight.detach().to(dtype))
    assert torch.equal(qkv.bias[48:64].cpu(), expected.bias.detach().to(dtype))


def test_tied_embeddings_share_memory(tmp_path):
    save_tiny(tmp_path, "llama", tie_word_embeddings=True)
    model = load_tiny(tmp_path)
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.parametrize("device", DEVICES)
def test_dummy_weights_are_seeded_and_sensible(demo_model, tmp_path, device):
    (tmp_path / "config.json").write_text((demo_model / "config.json").read_text())
    first, again, other = (load_dummy(tmp_path, seed, device) for seed in (3, 3, 2**63 - 1))
    prompt = random_prompt(21)
    logits = Sequences(first).step([(0, prompt)])[0]
    assert torch.equal(logits, Sequences(again).step([(0, prompt)])[0])
    assert not torch.equal(logits, Sequences(other).step([(0, prompt)])[0])
    assert 0.1 < logits.std() < 10
    assert not torch.equal(first.layers[0].mlp.down.weight, first.layers[1].mlp.down.weight)


def test_the_table_is_what_transformers_saves():
    """Keys and shapes of our table against transformers' own models, built without memory."""
    cases = [
        transformers.LlamaConfig(num_key_value_heads=8, attention_bias=True, mlp_bias=True),
        transformers.MistralConfig(tie_word_embeddings=True),
        transformers.Qwen2Config(num_key_value_heads=4),
        transformers.Qwen3Config(num_attention_heads=40, num_key_value_heads=8),
    ]
    for config in cases:
        config.num_hidden_layers = 2
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        config.architectures = [type(model).__name__]
        expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
        assert table_shapes(config) == expected


def table_shapes(config):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        table = weight_table(read_model_spec(Path(folder)))
    for parts in table.values():
        assert parameter_shape(parts)[1:] == parts[-1].shape[1:]
    return {part.key: part.shape for parts in table.values() for part in parts}


@pytest.mark.parametrize("device", DEVICES)
def test_the_demo_model_says_what_transformers_says(demo_model, device):
    """Trained weights and real text, greedy over 64 steps."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        demo_model, dtype=torch.float32, attn_implementation="eager"
    )
    reference.generation_config.eos_token_id = reference.config.eos_token_id = None
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_model)
    prompt = tokenizer("The old man walked slowly down to the").input_ids
    sequences = Sequences(load_tiny(demo_model, device))
    logits = sequences.step([(0, prompt)])[0]
    assert (logits - reference_logits(reference, prompt)).abs().max() <= 1e-4
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < 64:
        tokens.append(int(sequences.step([(0, tokens[-1:])])[0][-1].argmax()))
    assert_greedy(reference, prompt, tokens)
