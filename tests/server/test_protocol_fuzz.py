"""Random requests: a parser answers with a call or with a 4xx, never with anything else."""

import re
import string

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.server.body import parse_body
from bladellm_runtime.server.chat import parse_chat
from bladellm_runtime.server.completions import parse_completion
from bladellm_runtime.server.context import RequestContext, fit_max_tokens
from bladellm_runtime.server.errors import ApiError
from tests.support.cases import examples

CTX = RequestContext(["demo"], max_model_len=100, kv_tokens=1000, vocab_size=500)
STRICT = RequestContext(["demo"], max_model_len=100, kv_tokens=1000, vocab_size=500, strict=True)
NAMES = [
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "n", "best_of", "stop", "seed", "stop_tokens", "stop_token_ids", "stream", "stream_options",
    "logprobs", "top_logprobs", "logit_bias", "presence_penalty", "echo", "suffix", "frequency_penalty",
    "repetition_penalty", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "resume_response",
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "response_format",
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_other",
    "tools", "tool_choice", "functions", "function_call", "modalities", "audio",
    "structured_outputs", "user", "metadata", "bad_words", "unheard_of",
]  # fmt: skip
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "include_usage", "0", "499", "500", "name", "tool_calls", "json_schema", "é"]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.integers()
    | st.sampled_from([10**400, -(10**400), 2**63, 2**64])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["demo", "user", "assistant", "text", "true", "false", "auto", "none", "json_object"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=4))
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=5)}),
    min_size=1,
    max_size=3,
)
GOOD_START = st.fixed_dictionaries({"messages": MESSAGES, "prompt": st.text(min_size=1, max_size=5)})
BODIES = st.builds(
    lambda start, rest: {**start, **rest}, GOOD_START, st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4)
)
HEADER_VALUE = re.compile(f"[{re.escape(string.ascii_letters + string.digits)}_.-]+")


def check_refusal(error: ApiError) -> None:
    assert 400 <= error.status < 500
    answer = orjson.loads(error.body())
    assert list(answer) == ["error"]
    assert list(answer["error"]) == ["message", "type", "param", "code"]
    assert len(answer["error"]["message"]) <= 500


@settings(max_examples=examples(600))
@given(BODIES, st.sampled_from([parse_completion, parse_chat]), st.sampled_from([CTX, STRICT]), st.integers(0, 120))
def test_parsers_raise_nothing_but_4xx(body, parse, ctx, prompt_len):
    try:
        call = parse(body, ctx)
        fitted = fit_max_tokens(call.params, prompt_len, ctx)
    except ApiError as error:
        check_refusal(error)
        return
    assert 1 <= call.params.n <= 128
    assert 0 <= fitted.max_tokens <= 100 - prompt_len
    assert all(HEADER_VALUE.fullmatch(name) for name in call.ignored_fields)
    assert body.get("guided_other") is None
    kind = body["response_format"]["type"] if body.get("response_format") is not None else "text"
    asked = [name for name in GUIDED if body.get(name) is not None] + ["response_format"] * (kind != "text")
    assert ([] if call.constraint is None else [call.constraint.field]) == asked
    assert not (asked and (fitted.stop or fitted.stop_token_ids))


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=8), VALUES, max_size=6), st.booleans())
def test_any_json_body_ends_in_a_call_or_a_4xx(body, chat):
    try:
        parsed = parse_body(orjson.dumps(body))
    except (ApiError, TypeError):  # TypeError: an integer that orjson does not write
        return
    try:
        (parse_chat if chat else parse_completion)(parsed, CTX)
    except ApiError as error:
        check_refusal(error)
