"""RaggedAttention memory: each sequence's KV cache is variable in length and contiguous in address space."""
