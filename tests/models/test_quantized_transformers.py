"""compressed-tensors checkpoints, read by transformers with the compressed-tensors library and by us: equal logits."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file

from tests.models.harness import DEVICES, Sequences, load_tiny, random_prompt, reference_logits
from tests.models.quantized import FILE, SCHEMES, Tiny, assert_agrees, load_with_transformers, plan
from tests.support.cases import some_pairs

INT8_ROUNDING = 0.1
"""The library divides an input by its absmax / 127.5, we by its absmax / 127; static scales are the checkpoint's."""
SYMMETRIC = [name for name, scheme in SCHEMES.items() if scheme.symmetric]


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "family"), some_pairs(SYMMETRIC, ["llama", "qwen2", "qwen3"]))
def test_logits_are_those_of_transformers(tmp_path, name, family, device):
    options = {"head_dim": 16} if family == "qwen3" else {}
    tiny = Tiny(tmp_path, plan("compressed-tensors", SCHEMES[name]), family, **options)
    reference, model = load_with_transformers(tmp_path), load_tiny(tmp_path, device)
    scheme = SCHEMES[name]
    if scheme.kind == "int" and scheme.activations == "dynamic":
        prompt = random_prompt(31)
        theirs = reference_logits(reference, prompt)
        ours = Sequences(model).step([(0, prompt)])[0]
        assert (ours - theirs).abs().mean() <= INT8_ROUNDING * theirs.std()
    else:
        assert_agrees(tiny, model, reference)


@torch.no_grad()
def replace_with_library(tiny: Tiny, config: dict) -> None:
    """Give transformers' float model the weights that the compressed-tensors library unpacks module by module.

    transformers itself refuses asymmetric pack-quantized checkpoints with compressed-tensors 0.20: it expects the zero
    points unpacked, other than the library stores them.
    """
    stored = load_file(tiny.folder / FILE)
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    for name in tiny.weights:
        module = tiny.reference.get_submodule(name)
        tensors = {key.rpartition(".")[2]: stored[key] for key in stored if key.startswith(f"{name}.weight_")}
        tensors["weight_shape"] = torch.Size(tensors["weight_shape"].tolist())
        module.weight.copy_(PackedQuantizationCompressor.decompress(tensors, scheme)["weight"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name not in SYMMETRIC])
def test_asymmetric_weights_are_those_of_the_library(tmp_path, name, family, device):
    config = plan("compressed-tensors", SCHEMES[name])
    tiny = Tiny(tmp_path, config, family)
    for weight in tiny.weights:
        tiny.reference.get_submodule(weight).weight.data.fill_(torch.nan)
    replace_with_library(tiny, config)
    assert_agrees(tiny, load_tiny(tmp_path, device))
