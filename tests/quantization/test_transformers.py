"""New checkpoints as transformers reads them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils.quantization_config import AwqConfig, CompressedTensorsConfig, GPTQConfig

from bladellm_runtime.quantization.awq import Awq
from bladellm_runtime.quantization.compressed_tensors import CompressedTensors
from bladellm_runtime.quantization.gptq import Gptq
from bladellm_runtime.quantization.scheme import Scheme
from tests.quantization.reference import random_weight

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    dtype="float32",
)
PLAIN = "model.layers.1.mlp.down_proj"


def write(folder: Path, scheme: Scheme, kv_scales: bool) -> dict[str, torch.Tensor]:
    """A small random Llama in compressed-tensors, one layer of it plain. Returns its weights by module."""
    form = CompressedTensors.plan(scheme, ["lm_head", PLAIN], kv_scales=kv_scales)
    state = {key: value.detach() for key, value in LlamaForCausalLM(CONFIG).state_dict().items()}
    weights = {}
    for key in list(state):
        module = key.removesuffix(".weight")
        if "_proj" not in key or module == PLAIN:
            continue
        rows, columns = state.pop(key).shape
        weight = random_weight(scheme, rows, columns, dtype=torch.float32)
        weight.scales.mul_(0.01)
        weights[module] = weight.dequantize()
        state |= {f"{module}.{suffix}": tensor for suffix, tensor in form.pack(weight).items()}
    if kv_scales:
        names = [f"model.layers.{layer}.self_attn.{which}_scale" for layer in range(2) for which in "kv"]
        state |= {name: torch.ones(1) for name in names}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG.to_dict() | {"architectures": ["LlamaForCausalLM"], "quantization_config": form.config()}
    (folder / "config.json").write_text(json.dumps(config))
    return weights | {PLAIN: state[f"{PLAIN}.weight"]}


@pytest.mark.parametrize(
    ("scheme", "kv_scales"),
    [
        (Scheme(4, "int", 16), False),
        (Scheme(4, "int", 16, symmetric=False), True),
        (Scheme(4), False),
        (Scheme(8, "int", 16, symmetric=False), False),
        (Scheme(8, activations="dynamic"), False),
        (Scheme(8, activations="static"), False),
        (Scheme(8, "fp8"), False),
        (Scheme(8, "fp8", activations="dynamic"), False),
        (Scheme(8, "fp8", activations="static"), True),
    ],
    ids=repr,
)
def test_every_weight_is_what_we_stored(scheme: Scheme, kv_scales: bool, tmp_path: Path) -> None:
    """Asymmetric ones by dequantizing on loading: packed zero points do not fit the layers it makes otherwise."""
    weights = write(tmp_path, scheme, kv_scales)
    options = {} if scheme.symmetric else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, **options)
    logits = model(torch.arange(9)[None]).logits
    assert torch.isfinite(logits).all()
    for module, expected in weights.items():
        assert torch.equal(model.get_submodule(module).weight.detach(), expected), module


def test_configs_of_gptq_and_awq() -> None:
    gptq = GPTQConfig.from_dict(Gptq.plan(Scheme(8, "int", 64), ["lm_head", PLAIN]).config())
    assert (gptq.bits, gptq.group_size, gptq.sym, gptq.desc_act, gptq.format) == (8, 64, True, False, "gptq")
    awq = AwqConfig.from_dict(Awq.plan(Scheme(4), ["lm_head", PLAIN]).config())
    assert (awq.bits, awq.group_size, awq.zero_point, awq.format) == (4, -1, True, "gemm")
    assert awq.modules_to_not_convert == ["lm_head", PLAIN]
