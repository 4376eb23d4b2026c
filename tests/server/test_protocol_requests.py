"""parse_completion and parse_chat: which requests are taken, how they read, and which field a 400 names."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.server.chat import parse_chat
from bladellm_runtime.server.completions import parse_completion
from bladellm_runtime.server.context import RequestContext, SamplingDefaults, fit_max_tokens
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.unsupported import BOOKKEEPING_FIELDS
from tests.server.calls import BOTH, CTX, VOCAB, chat, completion, refusal


@BOTH
def test_what_is_left_out_has_openais_defaults(parse):
    call = parse()
    assert call.model == "demo"
    assert call.params.max_tokens == (16 if parse is completion else None)
    assert (call.params.n, call.params.temperature, call.params.top_p, call.params.seed) == (1, 1.0, 1.0, None)
    assert (call.stream, call.include_usage, call.continuous_usage) == (False, False, False)
    assert call.ignored_fields == ()


@BOTH
def test_null_means_left_out(parse):
    names = [
        "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "best_of",
        "stop", "stop_tokens", "stop_token_ids", "seed", "stream", "stream_options", "logprobs", "top_logprobs",
        "logit_bias", "presence_penalty", "frequency_penalty", "tools", "repetition_penalty", "min_tokens",
        "ignore_eos", "response_format", "guided_json", "structured_outputs", "suffix", "tool_choice",
        "include_stop_str_in_output", "skip_special_tokens", "chat_template", "resume_response",
        "chat_template_kwargs", "echo", "cache_salt",
    ]  # fmt: skip
    if parse is chat:
        names.remove("echo")
        names.remove("suffix")
    else:
        names.remove("resume_response")
        names.remove("chat_template_kwargs")
    assert parse(**dict.fromkeys(names)) == parse()


@BOTH
def test_every_sampling_field_arrives(parse):
    params = parse(
        n=3, best_of=3, max_tokens=9, temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=-2, frequency_penalty=2, seed=-1, stop=["a", "b"], stop_tokens=[1, 2], stop_token_ids=[2, 3],
        min_tokens=4, include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False,
        logit_bias={"0": -100, "499": 2.5},
    ).params  # fmt: skip
    assert (params.n, params.max_tokens, params.temperature, params.top_k, params.top_p) == (3, 9, 0.5, 7, 0.25)
    assert (params.min_p, params.repetition_penalty) == (0.125, 1.5)
    assert (params.presence_penalty, params.frequency_penalty, params.seed) == (-2, 2, -1)
    assert (params.stop, params.stop_token_ids, params.min_tokens) == (("a", "b"), (1, 2, 3), 4)
    assert (params.include_stop_str_in_output, params.ignore_eos, params.skip_special_tokens) == (True, True, False)
    assert params.logit_bias == {0: -100, 499: 2.5}


BAD_VALUES = {
    "model": [1, [], "", {}],
    "max_tokens": [0, -1, 10**12, "5", 1.5, True, [], 2**64],
    "max_completion_tokens": [0, -1, 10**12, "5", 1.5, False],
    "min_tokens": [-1, "1", 0.5],
    "temperature": [math.nan, math.inf, -math.inf, -0.1, 2.0001, 1e308, "1", True, 10**400, []],
    "top_p": [0, 1.0000001, -1, math.nan, "0.5", 10**400],
    "min_p": [-0.1, 1.1, math.nan, math.inf, "0"],
    "top_k": [-2, 1.5, "3", True, -(10**30)],
    "n": [0, -1, 129, 10**9, 1.0, "2", True],
    "best_of": [0, 2, 129, "1", 1.5],
    "presence_penalty": [-2.01, 2.01, math.nan, "x"],
    "frequency_penalty": [-2.01, 2.01, math.inf, None.__class__],
    "repetition_penalty": [0, 5e-324, 9e-21, -1, math.nan, math.inf, "1", 101],
    "seed": [2**64, 2**63, -(2**63) - 1, "1", 1.5, True],
    "stop": ["", ["a", ""], list("abcde"), "x" * 10_000_000, 5, {"a": 1}, ["x" * 1025]],
    "stop[1]": [["a", 5], ["a", None], ["a", ["b"]]],
    "stop_tokens": [5, "5", [VOCAB], [-1], list(range(129)), [2**70]],
    "stop_token_ids[0]": [[1.0], ["1"], [True], [None]],
    "logit_bias": [
        {str(VOCAB): 1}, {"-1": 1}, {"x": 1}, {"1.0": 1}, {"01": 1}, {"": 1}, {"²": 1}, {"1": math.nan}, {"1": 101},
        {"1": "1"}, {"1": None}, {"1": True}, {"9" * 5000: 1}, {str(key): 1 for key in range(10**5)}, [1], "x",
    ],
    "stream": ["yes", 1, "True", []],
    "ignore_eos": ["true", 1],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": ["x"],
    "top_logprobs": [-1, 21, "1", 1.5, 10**9, 1],
    "cache_salt": ["", " ", "a b", "x" * 257, "x" * 10_000_000, "a\n", "\0", "é", "🙂", 5, True, ["a"], {"a": 1}],
}  # fmt: skip


@BOTH
@pytest.mark.parametrize("param", BAD_VALUES)
def test_a_bad_value_is_a_4xx_naming_its_field(parse, param):
    for value in BAD_VALUES[param]:
        error = refusal(parse, param, **{param.partition("[")[0]: value})
        assert error.status == (404 if param == "model" and isinstance(value, str) else 400)


def test_unknown_model_is_404():
    error = refusal(chat, "model", model="gpt-9" * 1000)
    assert (error.status, error.code, error.type) == (404, "model_not_found", "not_found_error")
    assert completion(model="alias").model == "alias"


@BOTH
def test_max_completion_tokens_wins_but_both_are_checked(parse):
    assert parse(max_tokens=5, max_completion_tokens=9).params.max_tokens == 9
    refusal(parse, "max_tokens", max_tokens=0, max_completion_tokens=9)


def test_max_tokens_zero_only_scores_an_echoed_prompt():
    assert completion(max_tokens=0, echo=True).params.max_tokens == 0
    refusal(completion, "max_tokens", max_tokens=0, echo=False)
    refusal(chat, "max_tokens", max_tokens=0)


@BOTH
@pytest.mark.parametrize(("given_", "read"), [(-1, 0), (0, 0), (1, 1), (VOCAB, VOCAB), (10**9, VOCAB), (10**15, VOCAB)])
def test_top_k_off_and_clamped(parse, given_, read):
    assert parse(top_k=given_).params.top_k == read


@BOTH
def test_tiny_temperature_is_greedy(parse):
    assert parse(temperature=1e-45).params.greedy
    assert parse(temperature=0).params.greedy


@BOTH
def test_the_models_own_defaults_fill_in(parse):
    defaults = SamplingDefaults.from_generation_config(
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "eos_token_id": [1], "min_p": None}
    )
    ctx = RequestContext(["m"], 100, 1000, VOCAB, defaults=defaults)
    params = parse(ctx).params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0.6, 20, 0.95, 1.05)
    params = parse(ctx, temperature=0, top_k=0, top_p=1, repetition_penalty=1).params
    assert (params.temperature, params.top_k, params.top_p, params.repetition_penalty) == (0, 0, 1, 1)


@pytest.mark.parametrize("config", [{"temperature": -1}, {"top_k": "x"}, {"top_p": math.nan}, {"min_p": 2}])
def test_unusable_defaults_of_a_model_name_the_key(config):
    with pytest.raises(CheckpointError, match=rf"generation_config.json: .*{next(iter(config))}"):
        SamplingDefaults.from_generation_config(config)


# Streaming


@BOTH
def test_stream_and_its_options(parse):
    assert parse(stream="true").stream
    assert not parse(stream="false").stream
    call = parse(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert (call.stream, call.include_usage, call.continuous_usage) == (True, True, True)
    call = parse(stream=True, stream_options={"continuous_usage_stats": True, "include_obfuscation": False, "x": 1})
    assert (call.include_usage, call.continuous_usage, call.ignored_fields) == (False, False, ("stream_options.x",))
    refusal(parse, "stream_options", stream_options={"include_usage": True})
    refusal(parse, "stream_options", stream=True, stream_options=[1])
    refusal(parse, "stream_options.include_usage", stream=True, stream_options={"include_usage": 1})


# Log-probabilities


def test_completion_logprobs_as_integer_or_boolean():
    assert completion(logprobs=0).params.logprobs == 0
    assert completion(logprobs=5).params.logprobs == 5
    assert completion(logprobs=True).params.logprobs == 0
    assert completion(logprobs=True, top_logprobs=3).params.logprobs == 3
    assert completion(logprobs=False).params.logprobs is None
    assert completion(logprobs=2).params.prompt_logprobs is None
    assert completion(logprobs=2, echo=True).params.prompt_logprobs == 2
    for value in (-1, 21, 10**9, 1.5, "1", []):
        refusal(completion, "logprobs", logprobs=value)


def test_chat_logprobs():
    assert chat(logprobs=True).params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).params.logprobs == 20
    assert chat(top_logprobs=0).params.logprobs is None
    refusal(chat, "logprobs", logprobs=1)
    refusal(chat, "top_logprobs", top_logprobs=2, logprobs=False)


# Prompts


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]), (["a", "b"], ["a", "b"]), ([0, VOCAB - 1], [[0, VOCAB - 1]]), ([[1], [2, 3]], [[1], [2, 3]]),
        (["a", [1]], ["a", [1]]), ("\0", ["\0"]), (["x"] * 64, ["x"] * 64),
    ],
)  # fmt: skip
def test_prompt_shapes(prompt, prompts):
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"), ([], "prompt"), ("", "prompt"), ({}, "prompt"), (5, "prompt"), (True, "prompt"),
        ([""], "prompt[0]"), (["a", ""], "prompt[1]"), ([[]], "prompt[0]"), (["a", 5], "prompt[1]"),
        (["a", None], "prompt[1]"), (["x"] * 65, "prompt"), ([[1]] * 65, "prompt"),
        ([-1], "prompt"), ([1, VOCAB], "prompt"), ([2**63], "prompt"), ([1.0], "prompt[0]"), ([True], "prompt[0]"),
        ([1, "a"], "prompt[1]"),
        ([[1], [2, 1.5]], "prompt[1][1]"), ([[1], [VOCAB]], "prompt[1]"), ([None], "prompt[0]"),
        ([{}], "prompt[0]"), ([[[1]]], "prompt[0][0]"),
    ],
)  # fmt: skip
def test_bad_prompts_name_their_place(prompt, param):
    assert refusal(completion, param, prompt=prompt).status == 400


def test_missing_prompt_and_messages():
    for parse, param in ((parse_completion, "prompt"), (parse_chat, "messages")):
        with pytest.raises(ApiError) as caught:
            parse({"model": "demo"}, CTX)
        assert (caught.value.status, caught.value.param) == (400, param)


# Room


def test_fit_max_tokens_cuts_to_the_room():
    params = chat().params
    assert fit_max_tokens(params, 30, CTX).max_tokens == 70
    params = chat(max_tokens=10, min_tokens=8).params
    assert fit_max_tokens(params, 90, CTX) is params
    fitted = fit_max_tokens(params, 95, CTX)
    assert (fitted.max_tokens, fitted.min_tokens) == (5, 5)
    small = RequestContext(["m"], max_model_len=100, kv_tokens=50, vocab_size=VOCAB)
    assert fit_max_tokens(chat().params, 30, small).max_tokens == 20


def test_a_prompt_without_tokens_is_refused():
    """Chat templates can make one, and tokenizers that drop spaces."""
    with pytest.raises(ApiError, match="no tokens") as caught:
        fit_max_tokens(chat().params, 0, CTX)
    assert caught.value.status == 400


@given(st.integers(1, 200), st.integers(8, 150), st.integers(8, 150), st.none() | st.integers(1, 200))
def test_fit_max_tokens_never_exceeds_either_limit(prompt_len, model_len, kv_tokens, max_tokens):
    ctx = RequestContext(["m"], model_len, kv_tokens, VOCAB)
    room = min(model_len, kv_tokens) - prompt_len
    params = chat(max_tokens=max_tokens).params
    if room > 0:
        assert fit_max_tokens(params, prompt_len, ctx).max_tokens == min(room, max_tokens or room)
        return
    with pytest.raises(ApiError) as caught:
        fit_max_tokens(params, prompt_len, ctx)
    assert caught.value.code == "context_length_exceeded"
    limit = model_len if prompt_len >= model_len else kv_tokens
    assert str(prompt_len) in caught.value.message
    assert str(limit) in caught.value.message


def test_token_prompt_beyond_the_context_is_refused_before_its_ids_are_looked_at():
    error = refusal(completion, None, prompt=[1.5] * 100)
    assert (error.status, error.code) == (400, "context_length_exceeded")


# Fields that must act or be refused


CONSTRAINTS = [
    {"guided_anything": 1}, {"guided_whitespace_pattern": " ?"}, {"guided_decoding_backend": "outlines"},
    {"structured_outputs": {"json": {}}}, {"response_format": {}}, {"regex": "a"}, {"ebnf": "x"}, {"json_schema": "{}"},
    {"response_format": "text"}, {"response_format": {"type": "json_schema", "json_schema": {}}}, {"grammar": "x"},
    {"response_format": {"type": "structural_tag"}}, {"structural_tag": "x"},
    {"tools": [{"type": "function", "function": {"name": "f"}}]}, {"tool_choice": "required"}, {"functions": [{}]},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"function_call": {"name": "f"}},
    {"logits_processors": ["x"]}, {"bad_words": ["x"]}, {"allowed_token_ids": [1]}, {"chat_template": "{{ 1 }}"},
    {"suffix": "x"}, {"suffix": ""}, {"use_beam_search": True}, {"modalities": ["text", "audio"]},
    {"audio": {"voice": 1}},
    {"documents": [{}]}, {"prompt_embeds": "x"}, {"guided_" + "x" * 10_000: 1},
]  # fmt: skip


@BOTH
@pytest.mark.parametrize("fields", CONSTRAINTS, ids=lambda fields: next(iter(fields))[:40])
def test_constraints_are_never_dropped_silently(parse, fields):
    assert refusal(parse, next(iter(fields))[:64], **fields).status == 400


@BOTH
def test_constraint_fields_that_ask_for_nothing_pass(parse):
    call = parse(
        response_format={"type": "text"}, tools=[], tool_choice="auto", use_beam_search=False, modalities=["text"],
        bad_words=[], guided_json=None, structured_outputs={},
    )  # fmt: skip
    assert call.ignored_fields == ()


@BOTH
def test_unknown_fields_are_listed_or_refused(parse):
    odd = {"zeta": 1, "alpha": None, "new\r\nX-Evil: 1": 1, "é": 1, "x" * 65: 1, "": 1}
    assert parse(**odd).ignored_fields == ("alpha", "zeta")
    assert len(parse(**{f"f{number}": 1 for number in range(1000)}).ignored_fields) == 16
    strict = RequestContext(["m"], 100, 1000, VOCAB, strict=True)
    assert refusal(lambda **fields: parse(strict, **fields), "zeta", zeta=1).code == "unknown_field"
    assert parse(strict, **dict.fromkeys(BOOKKEEPING_FIELDS, "x"), n=2).params.n == 2
