"""Qwen3 (dense): query and key heads are normalised, and the head dimension is its own field."""

from bladellm_runtime.models.family import Family

FAMILY = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    qk_norm=True,
    head_dim=128,
    windows="by_layer",
)
