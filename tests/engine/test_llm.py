"""What `LLM` makes of its options."""

import torch

from bladellm_runtime import LLM
from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import TARGET_TBT_MS, target_tbt


def test_nobody_waits_for_tokens_of_a_file_of_prompts(demo_model):
    """On a GPU too steps are as long as they come, unless they are to be bounded."""
    gpu = torch.device("cuda")
    assert target_tbt(EngineArgs(model="m"), gpu) == TARGET_TBT_MS
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05) as llm:
        assert target_tbt(llm.args, gpu) == 0
    with LLM(str(demo_model), device="cpu", kv_cache_gib=0.05, target_tbt_ms=5.0) as llm:
        assert target_tbt(llm.args, gpu) == 5.0
        assert llm._engine.core._scheduler._planner.bound.milliseconds == 5.0
