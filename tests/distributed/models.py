"""Random checkpoints of every layout and format, small, with sizes that are odd."""

import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file

from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.registry import read_quantization
from tests.models.quantized import SCHEMES, plan, round_weight

FILE = "model.safetensors"
HEAD_DIM = 8
GATED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Random:
    """A llama-like checkpoint in `folder`: `heads`, `kv_heads`, and `inner` · 16 inner channels."""

    def __init__(
        self,
        folder: Path,
        *,
        heads: int,
        kv_heads: int,
        inner: int = 7,
        layers: int = 2,
        vocab: int = 200,
        method: str | None = None,
        scheme: str = "w4 g16",
        scrambled: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        tied: bool = False,
        biases: bool = True,
    ) -> None:
        self.folder, self.dtype, self.biases = folder, dtype, biases
        hidden, width = 48, inner * 16
        self.sizes = {
            "self_attn.q_proj": (heads * HEAD_DIM, hidden),
            "self_attn.k_proj": (kv_heads * HEAD_DIM, hidden),
            "self_attn.v_proj": (kv_heads * HEAD_DIM, hidden),
            "self_attn.o_proj": (hidden, heads * HEAD_DIM),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
        }
        self.config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": HEAD_DIM,
            "intermediate_size": width,
            "vocab_size": vocab,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            "attention_bias": biases,
            "mlp_bias": biases,
            "torch_dtype": str(dtype).removeprefix("torch."),
        }
        if method is not None:
            options = {"scrambled": True} if scrambled and method == "gptq" else {}
            self.config["quantization_config"] = plan(method, SCHEMES[scheme], **options)
            if scrambled and method == "compressed-tensors":
                group = self.config["quantization_config"]["config_groups"]["group_0"]
                group["weights"]["actorder"] = "group"
        self.tensors = self._outer(hidden, vocab, tied)
        for layer in range(layers):
            for name, size in self.sizes.items():
                self._linear(f"model.layers.{layer}.{name}", size, scrambled)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                self.tensors[f"model.layers.{layer}.{norm}.weight"] = torch.randn(hidden, dtype=dtype)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / FILE, metadata={"format": "pt"})

    @property
    def fields(self) -> Fields:
        return Fields(self.folder / "config.json", self.config)

    def _outer(self, hidden: int, vocab: int, tied: bool) -> dict[str, torch.Tensor]:
        tensors = {
            "model.embed_tokens.weight": torch.randn(vocab, hidden, dtype=self.dtype),
            "model.norm.weight": torch.randn(hidden, dtype=self.dtype),
        }
        if not tied:
            tensors["lm_head.weight"] = torch.randn(vocab, hidden, dtype=self.dtype)
        return tensors

    def _linear(self, module: str, size: tuple[int, int], scrambled: bool) -> None:
        weight = torch.randn(size)
        if "quantization_config" not in self.config:
            self.tensors[f"{module}.weight"] = weight.to(self.dtype)
        else:
            self._quantize(module, weight, scrambled)
        if self.biases:
            self.tensors[f"{module}.bias"] = torch.randn(size[0]).to(self.dtype)

    def _quantize(self, module: str, weight: torch.Tensor, scrambled: bool) -> None:
        form = read_quantization(self.fields.nested("quantization_config"))
        scheme = form.scheme_of(module, ())
        assert scheme is not None
        order = None
        if scrambled and scheme.group_size is not None:
            order = torch.randperm(weight.shape[1]).view(scheme.groups(weight.shape[1]), -1).sort(1).values.flatten()
        scale = 0.05 if scheme.activations == "static" else None
        packed = form.pack(round_weight(weight, scheme, form.scale_dtype(self.dtype), order, scale))
        self.tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}


def random_heads() -> tuple[int, int]:
    """Query and KV heads of which a share is a whole number of groups of 16 only sometimes."""
    kv_heads, size = random.choice(((1, 8), (2, 4), (4, 2), (8, 1), (2, 6), (3, 4), (5, 2)))
    return kv_heads * size, kv_heads
