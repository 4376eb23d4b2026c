"""Greedy output equals transformers', whatever the engine does to get there."""

from functools import cache
from pathlib import Path

import pytest
import torch

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.models.config import read_model_spec
from tests.engine import reference
from tests.engine.ties import assert_alike
from tests.support.cases import drawn_of

TOKENS = 24
MANY_TOKENS = 80

WAYS = {
    "overlap": {},
    "no overlap": {"disable_overlap": True},
    "chunks of 7": {"prefill_chunk_tokens": 7},
    "chunks of 7, no overlap": {"prefill_chunk_tokens": 7, "disable_overlap": True},
    "relocating": {"kv_arena": "relocating"},
    "paged": {"attn_cls": "paged"},
    "no prompt cache": {"disable_prompt_cache": True},
    "first layer known": {"precompute_first_layer": True},
    "steps of 32 tokens": {"ragged_flash_max_batch_tokens": 32},
}


@cache
def expected(folder: Path) -> dict[str, list[int]]:
    _, tokenizer = reference.load(folder)
    found = reference.greedy_all(folder, [tokenizer.encode(prompt) for prompt in reference.PROMPTS], TOKENS)
    return dict(zip(reference.PROMPTS, found, strict=True))


def token_bytes(folder: Path) -> int:
    """KV cache of one token in float32."""
    spec = read_model_spec(folder)
    return spec.layers * 2 * spec.kv_heads * spec.head_dim * 4


def greedy_params(tokens: int = TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def run(folder: Path, prompts: list[str], device: str, tokens: int = TOKENS, **options) -> tuple[list[list[int]], int]:
    with LLM(str(folder), dtype="float32", device=device, **({"kv_cache_gib": 0.1} | options)) as llm:
        outputs = llm.generate(prompts, greedy_params(tokens))
        return [output.outputs[0].token_ids for output in outputs], llm.stats().preemptions


def assert_equal(folder: Path, prompts: list[str], found: list[list[int]]) -> None:
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == expected(folder)[prompt], prompt


@pytest.fixture(params=["demo_model", pytest.param("target_model", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    """The model of the repository, and with the slow tests the larger one beside the checkout."""
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("way", drawn_of(WAYS, 1, always=["overlap"]))
def test_batch_of_16_equals_transformers(model, device, way):
    prompts = [reference.PROMPTS[i % len(reference.PROMPTS)] for i in range(16)]
    found, _ = run(model, prompts, device, **WAYS[way])
    assert_equal(model, prompts, found)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_long_answers_equal_transformers(model, device, way):
    _, tokenizer = reference.load(model)
    found, _ = run(model, list(reference.PROMPTS), device, MANY_TOKENS, **WAYS[way])
    for prompt, tokens in zip(reference.PROMPTS, found, strict=True):
        params = greedy_params(MANY_TOKENS)
        best = reference.greedy(model, tokenizer.encode(prompt), MANY_TOKENS)
        assert_alike(reference.load(model)[0], tokenizer.encode(prompt), params, tokens, best)


@pytest.mark.parametrize("overlap", [True, False])
def test_each_prompt_alone_equals_transformers(model, device, overlap):
    with LLM(str(model), dtype="float32", device=device, kv_cache_gib=0.1, disable_overlap=not overlap) as llm:
        for prompt in reference.PROMPTS:
            output = llm.generate([prompt], greedy_params())[0]
            assert_equal(model, [prompt], [output.outputs[0].token_ids])


PREEMPTING = [
    {},
    {"disable_overlap": True},
    {"prefill_chunk_tokens": 7},
    {"kv_arena": "relocating"},
    {"attn_cls": "paged"},
    {"disable_prompt_cache": True},
    {"prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.01},
]


@pytest.mark.parametrize("options", drawn_of(PREEMPTING, 2, always=[{}]), ids=str)
def test_preemption_does_not_change_tokens(model, device, options):
    """Memory for about four of sixteen sequences: the engine must preempt, and nobody may notice."""
    if device == "cuda" and "kv_arena" not in options:
        # A mapped granule of so small a model is longer than any of its sequences.
        options = options | {"attn_cls": "paged"}
    prompts = [reference.PROMPTS[i % len(reference.PROMPTS)] for i in range(16)]
    gib = 320 * token_bytes(model) / 1024**3
    found, preemptions = run(model, prompts, device, max_model_len=160, kv_cache_gib=gib, **options)
    assert preemptions > 0
    assert_equal(model, prompts, found)


def test_target_model_alone_and_together(target_model, device):
    prompts = list(reference.PROMPTS[:3])
    together, _ = run(target_model, prompts, device)
    assert_equal(target_model, prompts, together)


def test_logprobs_equal_transformers(demo_model, device):
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=5, prompt_logprobs=3)
    with LLM(str(demo_model), dtype="float32", device=device, kv_cache_gib=0.1, prefill_chunk_tokens=7) as llm:
        output = llm.generate([reference.PROMPTS[3]], params)[0]
    choice = output.outputs[0]
    ids = output.prompt_token_ids + choice.token_ids
    wanted = reference.logprobs(demo_model, ids)
    entries = [*output.prompt_logprobs, *choice.logprobs]
    assert len(entries) == len(ids) - 1
    for position, entry in enumerate(entries):
        assert entry.token_ids[0] == ids[position + 1]
        row = wanted[position]
        torch.testing.assert_close(torch.tensor(entry.logprobs), row[torch.tensor(entry.token_ids)], atol=2e-4, rtol=0)
        best = row.topk(len(entry.token_ids) - 1)
        torch.testing.assert_close(torch.tensor(entry.logprobs[1:]), best.values, atol=2e-4, rtol=0)


def test_seed_repeats_whatever_the_batch(demo_model, device):
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=1234, max_tokens=24, ignore_eos=True, n=2)
    with LLM(str(demo_model), dtype="float32", device=device, kv_cache_gib=0.25) as llm:
        alone = llm.generate([reference.PROMPTS[0]], params)[0]
        crowd = llm.generate([*reference.PROMPTS[1:], reference.PROMPTS[0]], params)[-1]
    assert [c.token_ids for c in alone.outputs] == [c.token_ids for c in crowd.outputs]
    assert alone.outputs[0].token_ids != alone.outputs[1].token_ids
