"""Rotary tables of every kind against transformers' own rotary embedding."""

import random

import pytest
import torch
from bladellm_kernels.rotary import rotary
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from bladellm_runtime.fields import Fields
from bladellm_runtime.layers.rotary import RotaryEmbedding
from bladellm_runtime.models.rope import read_rope

SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.5},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 512},
    {"rope_type": "yarn", "factor": 7.3, "beta_fast": 20, "beta_slow": 2.5, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.83},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.1},
    {"rope_type": "yarn", "factor": 40.0, "mscale": 0.7},
]


def both(scaling, head_dim, theta, max_positions):
    """transformers' rotary embedding and ours, from the same config."""
    values = {"rope_parameters": {**scaling, "rope_theta": theta}}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=max_positions,
        rope_parameters=dict(values["rope_parameters"]),
    )
    spec = read_rope(Fields("config.json", values), head_dim, max_positions)
    return LlamaRotaryEmbedding(config), RotaryEmbedding(spec, torch.device("cpu"))


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("head_dim", [4, 18, 64])
def test_turns_as_transformers_does(scaling, head_dim):
    theta = random.choice([1000.0, 10_000.0, 500_000.0])
    theirs, ours = both(scaling, head_dim, theta, 256)
    positions = torch.randperm(256)[:77]
    q, k = torch.randn(1, 3, 77, head_dim), torch.randn(1, 3, 77, head_dim)
    expected, _ = apply_rotary_pos_emb(q, k, *theirs(q, positions.unsqueeze(0)))
    actual = rotary(q[0].transpose(0, 1), *ours(positions))
    torch.testing.assert_close(actual, expected[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


def test_dynamic_scaling_grows_with_the_sequence_as_in_transformers():
    """transformers generating token by token, beyond the trained length, against one call of ours."""
    theirs, ours = both({"rope_type": "dynamic", "factor": 2.5}, 16, 10_000.0, 24)
    positions = torch.arange(70)
    cos, sin = ours(positions)
    for position in range(70):
        expected_cos, expected_sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        torch.testing.assert_close(cos[position, 0], expected_cos[0, 0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(sin[position, 0, 8:], expected_sin[0, 0, 8:], atol=2e-5, rtol=1e-4)
