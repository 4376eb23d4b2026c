"""The prompt cache through the whole engine: what it finds, and that nobody's tokens change because of it."""

from functools import cache
from pathlib import Path

import pytest

from bladellm_runtime import LLM, SamplingParams
from tests.engine import reference
from tests.engine.test_equality import TOKENS, expected, greedy_params, run
from tests.support.cases import drawn_of, some_pairs

LONG = "\n\n".join(reference.PROMPTS)
SOME = reference.PROMPTS[:5]
FORMATS = ["no_quant", "int8", "int4", "int8_affine", "int4_affine", "fp8_e4m3", "fp8_e5m2", "fp12_e4m7"]
MODES = {
    "paged": {"attn_cls": "paged"},
    "chunked": {"prefill_chunk_tokens": 7},
    "relocating": {"kv_arena": "relocating"},
    "no overlap": {"disable_overlap": True},
    "no prompt cache": {"disable_prompt_cache": True},
}


@cache
def usual(folder: Path, device: str, format: str) -> list[list[int]]:
    """Tokens of a KV format in the engine's default ways."""
    return run(folder, [*SOME, LONG], device, kv_cache_quant=format)[0]


@pytest.fixture
def llm(demo_model, device):
    with LLM(str(demo_model), dtype="float32", device=device, kv_cache_gib=0.1) as llm:
        yield llm


def cached_tokens(llm: LLM) -> int:
    return llm.stats().cached_tokens


def test_a_repeated_prompt_is_found_and_gives_the_same_tokens(llm, demo_model):
    for prompt in (LONG, LONG, *SOME, *SOME):
        output = llm.generate([prompt], greedy_params())[0]
        if prompt in reference.PROMPTS:
            assert output.outputs[0].token_ids == expected(demo_model)[prompt]
    first = len(llm.tokenizer.encode(LONG))
    assert cached_tokens(llm) >= first - llm.stats().granule_tokens


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(llm, demo_model):
    turn = llm.tokenizer.encode(reference.PROMPTS[0])
    for _ in range(3):
        before = cached_tokens(llm)
        answer = llm.generate([turn], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))[0].outputs[0]
        assert answer.token_ids == reference.greedy(demo_model, turn, 9)
        turn = turn + answer.token_ids + llm.tokenizer.encode(" And then?")
        found, known = cached_tokens(llm) - before, len(turn)
    # Everything but the question, and the last answer token, which was never fed back, was there already.
    assert found >= known - 2 * len(llm.tokenizer.encode(" And then?")) - 11


def test_the_last_token_of_a_prompt_is_always_computed(llm):
    tokens = llm.tokenizer.encode(LONG)[: 4 * llm.stats().granule_tokens]
    for _ in range(2):
        before = cached_tokens(llm)
        llm.generate([tokens], SamplingParams(temperature=0.0, max_tokens=1))
    assert cached_tokens(llm) - before == len(tokens) - 1


def test_prompt_logprobs_are_complete_although_the_prompt_is_cached(llm):
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    plain = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    llm.generate([LONG], plain)
    output = llm.generate([LONG], params)[0]
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) - 1


@pytest.mark.parametrize(("format", "mode"), some_pairs(FORMATS, MODES, 2))
def test_every_format_gives_the_same_tokens_in_every_mode(demo_model, device, format, mode):
    other, _ = run(demo_model, [*SOME, LONG], device, kv_cache_quant=format, **MODES[mode])
    assert other == usual(demo_model, device, format)


@pytest.mark.parametrize("format", drawn_of(FORMATS, 1))
def test_cached_and_preempted_requests_get_the_same_tokens_in_every_format(demo_model, device, format):
    count = len(SOME)
    prompts = [SOME[i % count] for i in range(16)]
    found = [usual(demo_model, device, format)[i % count] for i in range(16)]
    options = {"max_model_len": 160, "prompt_cache_enable_swap": True, "prompt_cache_swap_gib": 0.01}
    if device == "cuda":
        # A mapped granule of so small a model is longer than any of its sequences.
        options |= {"attn_cls": "paged"}
    with LLM(str(demo_model), dtype="float32", device=device, kv_cache_quant=format, kv_cache_gib=0.1) as llm:
        gib = max(0.0001, 320 * 0.1 / llm.ready.kv_tokens)
    with LLM(
        str(demo_model), dtype="float32", device=device, kv_cache_quant=format, kv_cache_gib=gib, **options
    ) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, greedy_params())
            assert [output.outputs[0].token_ids for output in outputs] == found
        assert llm.stats().preemptions > 0
        assert cached_tokens(llm) > 0


def test_int8_and_fp8_stay_close_to_the_unquantized_answer(demo_model, device):
    """Greedy tokens of a trained model mostly survive eight bits; the share that agrees before the first difference."""
    plain = usual(demo_model, device, "no_quant")
    for format in ("int8", "int8_affine"):
        found = usual(demo_model, device, format)
        agreed = [next((i for i in range(TOKENS) if a[i] != b[i]), TOKENS) for a, b in zip(plain, found, strict=True)]
        assert sum(agreed) > 0.5 * TOKENS * len(agreed), (format, agreed)
