"""Tiny decoder layers of transformers in float32, with random norms and biases, and what quantizers need of them."""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel, Qwen2Config, Qwen2Model, Qwen3Config, Qwen3Model

from bladellm_tools.quantize.algorithms.fold import Heads
from bladellm_tools.quantize.algorithms.layer import GROUPS, LayerWeights
from bladellm_tools.quantize.algorithms.statistics import InputStatistics

MODELS = {"llama": (LlamaConfig, LlamaModel), "qwen2": (Qwen2Config, Qwen2Model), "qwen3": (Qwen3Config, Qwen3Model)}
FAMILIES = tuple(MODELS)


@dataclass(frozen=True)
class Decoder:
    """A model without its head: `forward` and `collect` as the search for alpha takes them."""

    model: nn.Module
    heads: Heads

    def weights(self, index: int = 0) -> LayerWeights:
        return {name: tensor.detach().clone() for name, tensor in self.model.layers[index].state_dict().items()}

    def forward(self, index: int, weights: LayerWeights, hidden: torch.Tensor) -> torch.Tensor:
        rotation = self.model.rotary_emb(hidden, torch.arange(hidden.shape[1])[None])
        float_weights = {name: tensor.float() for name, tensor in weights.items()}
        arguments = {"position_embeddings": rotation, "attention_mask": None}
        with torch.no_grad():
            return torch.func.functional_call(self.model.layers[index], float_weights, (hidden,), arguments)

    def inputs(self, index: int, weights: LayerWeights, hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the linear layers of each group read, [tokens, K]."""
        seen: dict[str, torch.Tensor] = {}
        modules = dict(self.model.layers[index].named_modules())
        hooks = [
            modules[group.members[0]].register_forward_pre_hook(
                lambda _, args, name=group.name: seen.update({name: args[0].flatten(0, 1)})
            )
            for group in GROUPS
        ]
        self.forward(index, weights, hidden)
        for hook in hooks:
            hook.remove()
        return seen

    def collect(self, index: int, weights: LayerWeights, hidden: torch.Tensor) -> dict[str, InputStatistics]:
        return {name: statistics(x) for name, x in self.inputs(index, weights, hidden).items()}


def statistics(x: torch.Tensor) -> InputStatistics:
    """Of x [tokens, K], in float64 first."""
    wide = x.double()
    gram = wide.T @ wide / len(wide)
    return InputStatistics(gram.float(), wide.abs().amax(0).float(), wide.abs().mean(0).float(), len(x))


def decoder(family: str, heads: Heads, layers: int = 1, hidden: int = 48, inner: int = 80) -> Decoder:
    """Weights are random, norms and biases too."""
    config_class, model_class = MODELS[family]
    config = config_class(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads.query,
        num_key_value_heads=heads.kv, head_dim=heads.dim, vocab_size=32, max_position_embeddings=64,
    )  # fmt: skip
    model = model_class(config).eval()
    for name, tensor in model.state_dict().items():
        if "norm" in name:
            tensor.uniform_(0.2, 2.0)
        elif name.endswith("bias"):
            tensor.normal_()
        elif "layers" in name:
            tensor.normal_(std=tensor.shape[1] ** -0.5)
    return Decoder(model, heads)
