"""Captured steps with prefill chunks on the device: the tokens of eager steps, close scores in bf16, little memory."""

import logging

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams
from tests.engine.test_equality import assert_equal
from tests.engine.test_mixed_graphs import count_mixed
from tests.gpu.test_step_graphs import GREEDY, PROMPTS, WAYS

pytestmark = pytest.mark.gpu

SIZES = {"cuda_graph_batch_sizes": [5, 11], "cuda_graph_prefill_tokens": [8, 24, 64, 200], "max_running_requests": 11}
EAGER = {"disable_cuda_graph": True, "max_running_requests": 11}


@pytest.mark.parametrize("way", WAYS)
def test_graphs_change_no_token(demo_model, way, caplog):
    """Twice, the second time with prompts from the cache: chunks behind prefixes, beside decode rows and alone."""
    found = []
    for options in (SIZES, EAGER):
        options = {"device": "cuda", "dtype": "float32", "kv_cache_gib": 0.5} | options | WAYS[way]
        with caplog.at_level(logging.WARNING), LLM(str(demo_model), **options) as llm:
            sizes = count_mixed(llm) if "disable_cuda_graph" not in options else [0]
            outputs = llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, GREEDY)
            found.append([output.outputs[0].token_ids for output in outputs])
        assert sizes
    assert "cannot be captured" not in caplog.text
    assert found[0] == found[1]
    if "kv_cache_quant" not in WAYS[way]:
        assert_equal(demo_model, PROMPTS * 2, found[0])


@pytest.mark.parametrize("format", ["no_quant", "int8", "fp12_e4m7"])
def test_scores_of_long_prompts_in_bf16_are_close(demo_model, format):
    """Prompts of some hundreds of tokens in chunks of 100, several a step: every position's log-probability."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 30, ())))
    prompts = [torch.randint(3, 500, (length,), generator=generator).tolist() for length in (530, 90, 257, 601, 1)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    found = []
    for way in ({"cuda_graph_prefill_tokens": [128, 256, 512]}, {"disable_cuda_graph": True}):
        options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 0.5, "kv_cache_quant": format, **way}
        with LLM(str(demo_model), prefill_chunk_tokens=100, **options) as llm:
            sizes = count_mixed(llm) if "disable_cuda_graph" not in way else [0]
            outputs = llm.generate(prompts, params)
            found.append(torch.tensor([e.logprobs[0] for output in outputs for e in output.prompt_logprobs or []]))
        assert sizes
    assert (found[0] - found[1]).abs().mean() < 0.05
    assert (found[0] - found[1]).abs().max() < 1.0


@pytest.mark.whole_gpu
def test_default_graphs_share_their_memory(demo_model):
    """All token counts take little more than the largest one's activations, by what the whole GPU has in use."""
    used = []
    for sizes in ([0], []):
        options = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 0.5, "cuda_graph_prefill_tokens": sizes}
        with LLM(str(demo_model), **options):
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            used.append(total - free)
    assert used[1] - used[0] < 1 << 29
