"""Constraints act whatever else goes on: answers satisfy them, and others' tokens are those that they have alone."""

import random
import string
import time
from pathlib import Path
from typing import Any

import pytest

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.engine import build_runner
from bladellm_runtime.engine.sampling_state import SamplingState
from bladellm_runtime.errors import ParameterError
from bladellm_runtime.request import FinishReason
from tests.engine.captured import Again, captured_llm
from tests.engine.constrained import (
    GREEDY,
    KINDS,
    Asked,
    answers,
    check,
    random_asked,
    unconstrained,
    with_params,
)
from tests.engine.test_equality import token_bytes
from tests.engine.test_step_graphs import KernelState
from tests.models.harness import save_tiny
from tests.support.cases import drawn_of

QWEN = Path(__file__).parents[3] / "shared" / "tokenizers" / "qwen2"
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.1}
RANDOM_WEIGHTS = {"load_format": "dummy"}


@pytest.mark.parametrize(
    "weights", [pytest.param({}, marks=pytest.mark.slow), RANDOM_WEIGHTS], ids=["trained", "random"]
)
def test_answers_of_a_mixed_batch_satisfy_their_constraints(demo_model, weights):
    """Arrivals between steps, prompts in chunks, all ways of sampling; twice, the second time from the cache."""
    rng = random.Random()
    flags = OPTIONS | weights | {"dummy_seed": rng.randrange(2**32)}
    with LLM(str(demo_model), ragged_flash_max_batch_tokens=48, max_running_requests=9, **flags) as llm:
        asked = random_asked(rng, 14, llm.ready.vocab_size)
        for _ in range(2):
            found = answers(llm, asked, rng)
            for one, answer in zip(asked, found, strict=True):
                check(one, answer)
        assert sum(one.kind is not None for one in asked) == len(KINDS)
        stats = llm.stats()
        assert stats.guided_misses == len(KINDS)
        assert stats.guided_hits == len(KINDS)
        assert stats.guided_masks >= 2 * len(KINDS)
        assert stats.guided_cache_bytes > 0
        assert stats.guided_mask_seconds > 0


def fixed(llm: LLM) -> list[Asked]:
    """Greedy requests, the same in every run: numbers differ in the last bit from one way of computing to another."""
    return random_asked(random.Random(8), 14, llm.ready.vocab_size, GREEDY, tokens=(6, 24))


def greedy_tokens(llm: LLM, asked: list[Asked]) -> list[tuple[list[int], str, FinishReason | None]]:
    found = answers(llm, asked)
    for one, answer in zip(asked, found, strict=True):
        check(one, answer)
    return [(answer.tokens, answer.text, answer.finish) for answer in found]


@pytest.fixture(scope="module")
def expected(demo_model) -> list[Any]:
    """One request at a time, one step at a time."""
    with LLM(str(demo_model), disable_overlap=True, disable_prompt_cache=True, **OPTIONS) as llm:
        return [greedy_tokens(llm, [one])[0] for one in fixed(llm)]


MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"disable_overlap": True},
    "chunks of 7": {"prefill_chunk_tokens": 7, "ragged_flash_max_batch_tokens": 32},
    "few slots": {"max_running_requests": 3},
    "paged": {"attn_cls": "paged"},
    "relocating": {"kv_arena": "relocating"},
}


@pytest.mark.turns
@pytest.mark.parametrize("mode", drawn_of(MODES, 1, always=["overlap"]))
def test_every_way_gives_the_same_greedy_tokens(demo_model, expected, mode):
    with LLM(str(demo_model), **OPTIONS, **MODES[mode]) as llm:
        asked = fixed(llm)
        assert greedy_tokens(llm, asked) == expected
        if mode == "overlap":
            assert greedy_tokens(llm, asked) == expected, "with prompts from the cache"
            assert greedy_tokens(llm, unconstrained(asked)) == [
                answer for one, answer in zip(asked, expected, strict=True) if one.kind is None
            ]


@pytest.mark.parametrize("kernels", [pytest.param(False, marks=pytest.mark.slow), True])
def test_captured_steps_give_the_same_greedy_tokens(demo_model, expected, monkeypatch, kernels):
    """Masks come between the replays of the forward pass and of sampling; with kernels, between other ones too."""
    if kernels:
        monkeypatch.setattr(build_runner, "SamplingState", KernelState)
    sizes = {"cuda_graph_batch_sizes": [1, 4, 9], "cuda_graph_prefill_tokens": [16, 64]}
    with captured_llm(str(demo_model), capture := Again(), **OPTIONS, **sizes) as llm:
        assert greedy_tokens(llm, fixed(llm)) == expected
        assert capture.replays > 20


@pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_gives_way_goes_on_with_its_constraint(demo_model, expected, overlap):
    room = 144 * token_bytes(demo_model) / 2**30
    options = OPTIONS | {"kv_cache_gib": room, "max_model_len": 128, "disable_overlap": not overlap}
    with LLM(str(demo_model), **options) as llm:
        assert greedy_tokens(llm, fixed(llm)) == expected
        assert llm.stats().preemptions > 0


def test_random_tokens_of_others_do_not_change(demo_model):
    rng = random.Random(3)
    with LLM(str(demo_model), **OPTIONS) as llm:
        asked = random_asked(rng, 14, llm.ready.vocab_size, tokens=(25,))
        alone = answers(llm, unconstrained(asked))
        beside = [answer for one, answer in zip(asked, answers(llm, asked), strict=True) if one.kind is None]
        assert [answer.tokens for answer in beside] == [answer.tokens for answer in alone]


def test_log_probabilities_are_of_the_models_own_distribution(demo_model, monkeypatch):
    """Those of a constrained answer equal those of its tokens as part of a prompt, where no mask acts. Captured steps
    are sampled by what kernels would read."""
    for captured in (False, True):
        monkeypatch.setattr(build_runner, "SamplingState", KernelState if captured else SamplingState)
        params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=3)
        asked = Asked([40, 900, 77], "employee", params)
        sizes = {"cuda_graph_batch_sizes": [2], "cuda_graph_prefill_tokens": [8]} if captured else {}
        with captured_llm(str(demo_model), Again() if captured else None, **OPTIONS, **sizes) as llm:
            [answer] = answers(llm, [asked])
            again = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
            scored = llm.generate([asked.prompt + answer.tokens], again)[0].prompt_logprobs[2:]
        assert len(answer.logprobs) == len(scored) == 30
        for one, other in zip(answer.logprobs, scored, strict=True):
            assert one.token_ids[0] == other.token_ids[0]
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_a_complete_text_ends_the_request_whatever_else_was_asked(demo_model):
    """min_tokens and ignore_eos do not go on behind the last token that the constraint has; the text is whole."""
    with LLM(str(demo_model), **OPTIONS) as llm:
        for way in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"ignore_eos": True, "min_tokens": 50}):
            params = SamplingParams(temperature=1.0, max_tokens=60, **way)
            for output in llm.generate(["x"] * 3, params, guided_choice=["a", "ab", "b c d"]):
                completion = output.outputs[0]
                assert completion.finish_reason is FinishReason.STOP, way
                assert completion.text in ("a", "ab", "b c d")
        # Nothing but an end token may come, and min_tokens holds it back: the text is as long as it can be.
        for minimum in (0, 5):
            params = SamplingParams(temperature=1.0, max_tokens=60, min_tokens=minimum)
            [output] = llm.generate(["x"], params, guided_regex="(abc)?")
            assert (output.outputs[0].text, output.outputs[0].finish_reason) in [
                ("abc", FinishReason.STOP), ("", FinishReason.STOP),
            ]  # fmt: skip
            assert not minimum or output.outputs[0].text == "abc"


def test_stop_tokens_end_an_answer_and_have_no_text(demo_model):
    with LLM(str(demo_model), **OPTIONS) as llm:
        comma = llm.tokenizer.encode(",", add_special_tokens=False)[-1]
        asked = [Asked([5, 900 + number], "mixed", SamplingParams(max_tokens=60, seed=number)) for number in range(6)]
        plain = answers(llm, asked)
        stopped = answers(llm, [with_params(one, stop_token_ids=(comma,)) for one in asked])
        for before, after in zip(plain, stopped, strict=True):
            place = before.tokens.index(comma) if comma in before.tokens else len(before.tokens) - 1
            assert after.tokens == before.tokens[: place + 1]
            assert (after.text + "," == before.text[: len(after.text) + 1]) == (comma in before.tokens)
        assert any(comma in answer.tokens for answer in plain)


def test_an_answer_ends_where_only_its_stop_tokens_may_follow_and_min_tokens_holds_them_back(demo_model):
    """As where only an end token may follow: it is no fault of the model's."""
    with LLM(str(demo_model), dtype="float32", device="cpu", kv_cache_gib=0.02) as llm:
        for character in string.ascii_letters:
            stops = (2**30, *llm.tokenizer.encode(character))
            params = SamplingParams(temperature=1.0, max_tokens=9, min_tokens=4, stop_token_ids=stops)
            choice = llm.generate(["The"], params, guided_choice=[f"9{character}"])[0].outputs[0]
            assert (choice.text, choice.finish_reason, choice.error) == ("9", FinishReason.STOP, None), character


def test_row_30_a_constraint_without_an_end_stops_at_max_tokens(demo_model):
    with LLM(str(demo_model), **OPTIONS) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, min_tokens=40)
        [output] = llm.generate(["It is a truth"], params, guided_regex=".*")
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert len(output.outputs[0].token_ids) == 40
        assert "\n" not in output.outputs[0].text


def test_both_back_ends_give_the_same_greedy_tokens(demo_model):
    found = []
    patterns = [
        KINDS["ipv4"].fields["guided_regex"],
        KINDS["words"].fields["guided_regex"],
        r"(\d+|[a-c]{2,}x)+!",
        "é?日",
    ]
    for backend in ("llguidance", "fsm"):
        with LLM(str(demo_model), guided_backend=backend, **OPTIONS) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=24)
            outputs = [llm.generate(["The", "x 1", "12."], params, guided_regex=pattern) for pattern in patterns]
            found.append([(each.outputs[0].token_ids, each.outputs[0].text) for output in outputs for each in output])
            [output] = llm.generate(["The"], params, guided_json={"type": "object"})
            assert (output.outputs[0].error == "constraint_refused") == (backend == "fsm")
    assert found[0] == found[1]


def test_the_start_may_get_ready_for_json(demo_model):
    with LLM(str(demo_model), enable_json_warmup=True, **OPTIONS) as llm:
        assert "warm up JSON" in dict(llm.ready.phases)
        before = llm.stats()
        start = time.monotonic()
        [output] = llm.generate(["x"], SamplingParams(max_tokens=1), guided_json={"type": "object"})
        assert output.outputs[0].text.startswith("{")
        assert time.monotonic() - start < 5
        assert (before.guided_misses, llm.stats().guided_misses, llm.stats().guided_hits) == (1, 1, 1)


def test_constraints_of_a_call_are_refused_with_their_reason(demo_model):
    with LLM(str(demo_model), **OPTIONS) as llm:
        params = SamplingParams(max_tokens=5)
        with pytest.raises(ParameterError, match="guided_json and guided_regex cannot be combined"):
            llm.generate(["x"], params, guided_regex="a", guided_json={"type": "object"})
        with pytest.raises(ParameterError, match="guided_choice must be"):
            llm.generate(["x"], params, guided_choice=[])
        output, _ = llm.generate(["x", "y"], params, guided_regex="(a")
        completion = output.outputs[0]
        assert (completion.finish_reason, completion.error) == (FinishReason.ERROR, "constraint_refused")
        assert completion.message.startswith("guided_regex cannot be used: a group is not closed")
        assert llm.stats().guided_refused == 2
        [output] = llm.generate(["x"], params, guided_grammar='start: "ab" | "c"')
        assert output.outputs[0].text in ("ab", "c")


RANKS: dict[str, dict[str, Any]] = {
    "2 stages": {"pipeline_parallel_size": 2},
    "2 ranks": {"tensor_parallel_size": 2},
    "2 ranks, no overlap": {"tensor_parallel_size": 2, "disable_overlap": True},
    "2 stages, no overlap": {"pipeline_parallel_size": 2, "disable_overlap": True},
    "2 stages of 2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
    "3 stages, 5 micro-batches": {"pipeline_parallel_size": 3, "pipeline_micro_batch": 5},
    "3 stages, 1 micro-batch": {"pipeline_parallel_size": 3, "pipeline_micro_batch": 1},
}


@pytest.mark.turns("ranks")
@pytest.mark.parametrize(
    "ranks",
    [ranks if number < 1 else pytest.param(ranks, marks=pytest.mark.slow) for number, ranks in enumerate(RANKS)],
)
def test_ranks_give_the_same_greedy_tokens(demo_model, expected, ranks):
    """Only the first one has matchers: masks go to those that sample. All together, and one alone: its micro-batch is
    then the only one that has anything to run."""
    with LLM(str(demo_model), **OPTIONS, **RANKS[ranks]) as llm:
        asked = fixed(llm)
        assert greedy_tokens(llm, asked) == expected
        assert greedy_tokens(llm, asked[:1]) == expected[:1]
        rng = random.Random(4)
        others = random_asked(rng, 8, llm.ready.vocab_size)
        for one, answer in zip(others, answers(llm, others, rng), strict=True):
            check(one, answer)


@pytest.mark.slow
@pytest.mark.skipif(not QWEN.is_dir(), reason="needs ../shared/tokenizers/qwen2")
def test_a_vocabulary_of_151643_tokens_on_random_weights(tmp_path):
    """The model has more embeddings than the tokenizer has tokens, which nothing may choose."""
    save_tiny(tmp_path, "qwen2", vocab_size=151_936)
    rng = random.Random()
    with LLM(str(tmp_path), tokenizer_dir=str(QWEN), **OPTIONS | {"max_model_len": 256}) as llm:
        asked = random_asked(rng, 28, llm.tokenizer.vocab_size)
        for one, answer in zip(asked, answers(llm, asked, rng), strict=True):
            check(one, answer)
            assert one.kind is None or max(answer.tokens) < llm.tokenizer.vocab_size
