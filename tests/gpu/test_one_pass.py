"""Prompts by attention in one pass, in captured steps and eager ones: log-probabilities as close to transformers' in
float32 as those of other kernels."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bladellm_runtime import LLM, SamplingParams
from tests.engine.test_mixed_graphs import count_mixed
from tests.support.late_kernels import no_late_kernels

pytestmark = [pytest.mark.gpu(hopper=True), pytest.mark.timeout(300)]

LENGTHS = (900, 33, 301, 1500, 2, 640)
CAPTURED: dict[str, Any] = {"cuda_graph_prefill_tokens": [256, 512], "cuda_graph_batch_sizes": [1, 8]}
"""Steps of more tokens than the largest captured one are eager."""
OTHERS: dict[str, Any] = {"attn_cls": "paged", "disable_cuda_graph": True}
"""By other kernels."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Random, with heads that attention in one pass takes, and weights that bfloat16 holds."""
    folder = tmp_path_factory.mktemp("one_pass")
    config = LlamaConfig(
        vocab_size=8192, hidden_size=768, intermediate_size=768, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=128, max_position_embeddings=4096, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def scores(model, tokenizer, prompts: list[list[int]], **options) -> torch.Tensor:
    """Log-probabilities of all prompt tokens but the first ones: the second time behind prefixes from the cache."""
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0, ignore_eos=True)
    flags = {"device": "cuda", "dtype": "bfloat16", "kv_cache_gib": 1.0}
    with LLM(str(model), tokenizer_dir=str(tokenizer), prefill_chunk_tokens=700, **flags, **options) as llm:
        sizes = count_mixed(llm) if "cuda_graph_prefill_tokens" in options else [0]
        with no_late_kernels():
            outputs = llm.generate(prompts, params)
            longer = llm.generate([prompt + prompt[:200] for prompt in prompts], params)
    assert sizes
    return torch.tensor([e.logprobs[0] for output in outputs + longer for e in output.prompt_logprobs or []])


def reference(model, prompts: list[list[int]]) -> torch.Tensor:
    judge = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for prompt in prompts + [prompt + prompt[:200] for prompt in prompts]:
        with torch.inference_mode():
            logs = judge(torch.tensor([prompt])).logits[0].log_softmax(-1)
        found.append(logs[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0])
    return torch.cat(found)


@pytest.mark.parametrize("format", ["no_quant", "fp12_e4m7"])
def test_scores_are_as_close_to_float32_as_those_of_other_kernels(model, demo_model, format):
    """In 12 bits, too: on what steps computed, on numbers made of codes, and behind long prefixes on codes."""
    prompts = [torch.randint(3, 8192, (length,)).tolist() for length in LENGTHS]
    expected = reference(model, prompts)
    ways = ({**CAPTURED, "kv_cache_quant": format}, OTHERS)
    found, others = ((scores(model, demo_model, prompts, **options) - expected).abs() for options in ways)
    assert found.mean() < 1.2 * others.mean() + 1e-3
    assert found.max() < 2 * others.max() + 1e-2
