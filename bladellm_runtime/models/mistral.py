"""Mistral 7B and Nemo: Llama with a sliding window in every layer (v0.1) or none (v0.2 on)."""

from bladellm_runtime.models.family import Family

FAMILY = Family(architecture="MistralForCausalLM", model_type="mistral", windows="every_layer")
