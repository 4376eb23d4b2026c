"""Reading the float model: what is stored, padded or refused; the folder is never touched."""

import json

import pytest
import safetensors.torch
import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.config import read_model_spec
from bladellm_tools.quantize.pipeline.source import open_float_model
from tests.models.harness import random_prompt, reference_logits, save_tiny
from tests.models.test_families import CASES
from tests.quantize.test_forward import run


def change(folder, edit):
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    edit(tensors)
    safetensors.torch.save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("shards", ["1GB", "60KB"])
@pytest.mark.parametrize("case", ["llama", "llama-tied-biased", "qwen3-tied-biased"])
def test_layers_and_outer_tensors_are_all_there_is(case, shards, tmp_path):
    reference = save_tiny(tmp_path, CASES[case][0], shards, **CASES[case][1])
    state = dict(reference.state_dict())
    if reference.config.tie_word_embeddings:
        del state["lm_head.weight"]
    with open_float_model(tmp_path) as model:
        read = dict(model.outer())
        for index, weights in model.layers():
            read |= {f"model.layers.{index}.{name}": tensor for name, tensor in weights.items()}
        assert model.bytes == sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
        assert torch.equal(model.embedding(), state["model.embed_tokens.weight"])
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], state[name]) for name in state)


def test_layers_begin_where_asked(tmp_path):
    save_tiny(tmp_path, "llama")
    with open_float_model(tmp_path) as model:
        assert [index for index, _ in model.layers(1)] == [1, 2]
        assert list(model.layers(3)) == []


def test_stored_types_are_kept(tmp_path):
    save_tiny(tmp_path, "llama")
    change(tmp_path, lambda tensors: tensors.update({key: tensors[key].bfloat16() for key in list(tensors)[::2]}))
    stored = safetensors.torch.load_file(tmp_path / "model.safetensors")
    with open_float_model(tmp_path) as model:
        for index, weights in model.layers():
            for name, tensor in weights.items():
                assert torch.equal(tensor, stored[f"model.layers.{index}.{name}"])
                assert tensor.dtype == stored[f"model.layers.{index}.{name}"].dtype


@pytest.mark.parametrize("case", ["llama", "llama-tied-biased"])
def test_padding_changes_no_logit(case, tmp_path):
    """58 inner channels become 64."""
    reference = save_tiny(tmp_path, CASES[case][0], **CASES[case][1])
    with open_float_model(tmp_path, pad_multiple=32) as model:
        assert model.spec.intermediate_size == model.config["intermediate_size"] == 64
        layers, outer, spec = [weights for _, weights in model.layers()], model.outer(), model.spec
    assert layers[0]["mlp.up_proj.weight"].shape == (64, 48)
    assert layers[0]["mlp.down_proj.weight"].shape == (48, 64)
    assert not layers[0]["mlp.up_proj.weight"][58:].any()
    assert not layers[0]["mlp.down_proj.weight"][:, 58:].any()
    prompt = random_prompt(19)
    logits = run(spec, layers, outer, torch.tensor([prompt]), "cpu")[0]
    assert (logits - reference_logits(reference, prompt)).abs().max() <= 1e-4


def test_padding_to_a_multiple_there_is_does_nothing(tmp_path):
    save_tiny(tmp_path, "llama")
    with open_float_model(tmp_path, pad_multiple=29) as model:
        assert model.spec == read_model_spec(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_refused(value, tmp_path):
    save_tiny(tmp_path, "llama")

    def spoil(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = value

    change(tmp_path, spoil)
    with open_float_model(tmp_path) as model:
        model.refuse_unusable("model.layers.0.", model.layer(0))
        with pytest.raises(
            CheckpointError, match=r"model.safetensors: model.layers.1.mlp.up_proj.weight holds 1 value"
        ):
            model.refuse_unusable("model.layers.1.", model.layer(1))


def test_large_finite_values_are_no_reason(tmp_path):
    save_tiny(tmp_path, "llama")
    change(tmp_path, lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(3e38))
    with open_float_model(tmp_path) as model:
        model.refuse_unusable("model.layers.0.", model.layer(0))


def test_quantized_models_are_refused(tmp_path):
    save_tiny(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with (
        pytest.raises(CheckpointError, match=r"config.json: quantization_config .* already \('awq'\)"),
        open_float_model(tmp_path),
    ):
        pass


def test_quantized_tensors_are_refused_though_the_config_is_silent(tmp_path):
    save_tiny(tmp_path, "llama")

    def add(tensors):
        tensors["model.layers.0.mlp.up_proj.qweight"] = torch.zeros(2, 2, dtype=torch.int32)

    change(tmp_path, add)
    with (
        pytest.raises(CheckpointError, match=r"up_proj.qweight says that the model is quantized already"),
        open_float_model(tmp_path),
    ):
        pass
