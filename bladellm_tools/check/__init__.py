"""`blade_llm_check`: whether this machine can serve, one line a probe."""
