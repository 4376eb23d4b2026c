"""Pipeline stages on GPUs: the tokens of one GPU, and launches that wait for nothing."""

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu(count=2)

WAYS = [
    SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.7, repetition_penalty=1.2, frequency_penalty=0.3, seed=5, max_tokens=40),
    SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=2, max_tokens=24),
]
PROMPTS = [[7, 8, 9, index + 20, *range(50, 50 + 9 * index)] for index in range(20)]


def tokens(model, **options) -> list[list[int]]:
    """Asked twice, the second time from the prompt cache."""
    with LLM(str(model), device="cuda", dtype="float32", kv_cache_gib=0.5, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, [WAYS[index % len(WAYS)] for index in range(len(PROMPTS))])
        return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}, {"disable_overlap": True}])
@pytest.mark.parametrize("degrees", [(1, 2), (2, 2), (1, 4)])
def test_stages_give_the_tokens_of_one_gpu(demo_model, degrees, options):
    if torch.cuda.device_count() < degrees[0] * degrees[1]:
        pytest.skip("needs more CUDA devices")
    sizes = {"tensor_parallel_size": degrees[0], "pipeline_parallel_size": degrees[1]}
    assert tokens(demo_model, **sizes, **options) == tokens(demo_model, **options)


def test_the_first_stage_launches_without_waiting_for_its_gpu(demo_model, monkeypatch):
    with LLM(str(demo_model), device="cuda", kv_cache_gib=0.5, pipeline_parallel_size=2) as llm:
        runner = llm._engine.core._runner._runner
        launch = runner.launch

        def guarded(plan):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        llm.generate(PROMPTS, WAYS[0])
        monkeypatch.setattr(runner, "launch", guarded)
        assert len(llm.generate(PROMPTS, WAYS[0])) == len(PROMPTS)
