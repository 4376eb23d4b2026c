"""Qwen2 and Qwen2.5: a bias on QKV, and on request a sliding window in the upper layers."""

from bladellm_runtime.models.family import Family

FAMILY = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", qkv_bias=True, windows="by_layer")
