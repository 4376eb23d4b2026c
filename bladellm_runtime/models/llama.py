"""Llama 1 to 3 and models with its config: Yi, SmolLM, TinyLlama, DeepSeek's dense ones."""

from bladellm_runtime.models.family import Family

FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    mlp_bias="mlp_bias",
)
