"""On CUDA a launch only enqueues: nothing in it may wait for the device."""

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams

pytestmark = pytest.mark.gpu

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    "filters": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3, max_tokens=24, ignore_eos=True),
    "penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, seed=5, max_tokens=24
    ),
    "bias": SamplingParams(temperature=0.0, logit_bias={5: 3.0, 9: -100.0}, min_tokens=8, max_tokens=24),
    "logprobs": SamplingParams(temperature=0.0, logprobs=5, prompt_logprobs=2, max_tokens=24),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("names", [["greedy"], ["filters"], ["penalties"], ["bias"], ["logprobs"], list(PARAMS)])
def test_launch_never_synchronises(demo_model, monkeypatch, names, dtype):
    with LLM(str(demo_model), device="cuda", dtype=dtype, kv_cache_gib=0.5, prefill_chunk_tokens=7) as llm:
        runner = llm._engine.core._runner
        prompts = [[7, 8, 9, index + 20, *range(50, 50 + 3 * index)] for index in range(10)]
        params = [PARAMS[names[index % len(names)]] for index in range(10)]
        warm = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        launch = runner.launch

        def guarded(plan):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return launch(plan)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        monkeypatch.setattr(runner, "launch", guarded)
        again = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    if dtype == "float32":  # else rounding depends on what the prompt cache leaves of a chunk
        assert again == warm


def test_cpu_and_cuda_agree(demo_model):
    """The same tokens in float32, drawn with the same random numbers, on both devices."""
    prompts = [[100 + index, 7, 9, 11, *range(60, 60 + index)] for index in range(12)]
    found = []
    for device in ("cpu", "cuda"):
        with LLM(str(demo_model), device=device, dtype="float32", kv_cache_gib=0.25) as llm:
            params = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params)])
    equal = sum(a == b for a, b in zip(*found, strict=True))
    assert equal >= 11, f"{12 - equal} of 12 sampled sequences differ"
