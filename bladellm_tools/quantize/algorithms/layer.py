"""The parts of a decoder layer a quantizer works on, by their names in the checkpoint."""

from dataclasses import dataclass

import torch

LayerWeights = dict[str, torch.Tensor]
"""Tensors of one decoder layer by their name inside it: `self_attn.q_proj.weight`, `input_layernorm.weight`."""


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linear layers that read the same input.

    `producer` makes that input, channel by channel: a norm, or a linear layer with the channels as its rows. So an
    input can be divided by s per channel by dividing the producer, and the members' columns multiplied by s to match.
    """

    name: str
    members: tuple[str, ...]
    producer: str


QKV = LinearGroup("qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm")
OUTPUT = LinearGroup("output", ("self_attn.o_proj",), "self_attn.v_proj")
GATE_UP = LinearGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm")
DOWN = LinearGroup("down", ("mlp.down_proj",), "mlp.up_proj")
GROUPS = (QKV, OUTPUT, GATE_UP, DOWN)
"""In the order of the data flow. Members of a group are served as one fused layer: they share a scheme."""
