"""Answers: checked against the openai package's own types, and events against what was put in."""

import math

import openai.types
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.server.adapters import Adapters
from bladellm_runtime.server.errors import (
    ApiError,
    from_parameter_error,
    generation_error,
    internal_error,
    invalid_request,
)
from bladellm_runtime.server.logprobs import ChoiceLogprobs, TokenLogprob
from bladellm_runtime.server.models_api import model_card, models_list
from bladellm_runtime.server.named_adapters import NamedAdapters
from bladellm_runtime.server.responses import DONE, Choice, ChunkFormatter, Usage, response_body
from bladellm_runtime.wire.messages import TokenLogprobs

PIECES = [b"Hel", b"lo", b" \xf0\x9f", b"\x98\x80", "é".encode(), b"\xff", b"", b'"\\\n']
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
FINISH = st.sampled_from(["stop", "length"])
TOKENS = st.integers(0, len(PIECES) - 1)
LOGPROBS = st.floats(max_value=0.0) | st.just(-math.inf)


@st.composite
def scores(draw, most=5):
    top = draw(st.integers(0, 3))
    return [
        TokenLogprobs(draw(st.lists(TOKENS, min_size=top + 1, max_size=top + 1)),
                      draw(st.lists(LOGPROBS, min_size=top + 1, max_size=top + 1)))
        for _ in range(draw(st.integers(1, most)))
    ]  # fmt: skip


def events(raw: bytes) -> list[dict]:
    assert raw.endswith(b"\n\n")
    parts = raw.split(b"\n\n")[:-1]
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [orjson.loads(part[6:]) for part in parts]


def strictly(model: type, value: dict):
    """The openai type, with no field missing, of another type, or unknown to it."""
    checked = model.model_validate_json(orjson.dumps(value), strict=True)
    assert checked.model_dump(mode="json", exclude_unset=True) == value
    assert_known(checked)
    return checked


def assert_known(value):
    if isinstance(value, list):
        for item in value:
            assert_known(item)
    elif isinstance(value, openai.BaseModel):
        assert not value.model_extra
        for name in value.model_fields_set:
            assert_known(getattr(value, name))


@given(TEXT, TEXT, FINISH, st.none() | scores())
def test_bodies_are_openais(text, other, finish, given_scores):
    entries = None if given_scores is None else ChoiceLogprobs(PIECES.__getitem__).extend(given_scores)
    choices = [Choice(1, other, "stop"), Choice(0, text, finish, entries)]
    chat = strictly(ChatCompletion, orjson.loads(response_body("chat", "c-1", 7, "m", choices, Usage(3, 4))))
    assert [choice.message.content for choice in chat.choices] == [text, other]
    assert [choice.index for choice in chat.choices] == [0, 1]
    assert chat.choices[0].finish_reason == finish
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens) == (3, 4, 7)
    plain = strictly(Completion, orjson.loads(response_body("completion", "c-1", 7, "m", choices, Usage(3, 4))))
    assert [choice.text for choice in plain.choices] == [text, other]
    assert (chat.choices[0].logprobs is None) == (plain.choices[0].logprobs is None) == (entries is None)


# The openai package has no chunk type for completions: chunks are Completion objects with finish_reason null, which
# its type does not know either; so a chunk is checked with the reason filled in.
def completion_chunk(value: dict):
    filled = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in value["choices"]]
    return strictly(Completion, {**value, "choices": filled})


DELTAS = st.lists(st.tuples(st.integers(0, 3), TEXT, st.none() | scores(2), st.none() | FINISH), max_size=6)


@given(DELTAS, st.booleans(), st.booleans(), st.sampled_from(["chat", "completion"]))
def test_events_carry_exactly_what_was_put_in(deltas, include_usage, continuous, kind):
    formatter = ChunkFormatter(
        kind, 'id"1', 7, "m\\é", include_usage=include_usage, continuous_usage=include_usage and continuous
    )
    check = (lambda value: strictly(ChatCompletionChunk, value)) if kind == "chat" else completion_chunk
    for step, (index, text, given_scores, finish) in enumerate(deltas):
        entries = None if given_scores is None else ChoiceLogprobs(PIECES.__getitem__).extend(given_scores)
        usage = Usage(5, step) if include_usage and continuous else None
        [event] = events(formatter.delta(index, text, entries, finish, usage))
        chunk = check(event)
        assert (chunk.id, chunk.created, chunk.model) == ('id"1', 7, "m\\é")
        [choice] = event["choices"]
        assert choice["index"] == index
        assert choice["finish_reason"] == finish
        assert (choice["delta"]["content"] if kind == "chat" else choice["text"]) == text
        assert (choice["logprobs"] is None) == (entries is None)
        assert ("usage" in event) == include_usage
        if include_usage:
            assert event["usage"] == (usage.as_dict() if usage else None)


def test_the_first_chunk_of_a_chat_choice_has_the_role():
    [event] = events(ChunkFormatter("chat", "c", 1, "m", include_usage=True).first(2))
    assert strictly(ChatCompletionChunk, event).choices[0].delta.role == "assistant"
    assert event["choices"][0]["index"] == 2
    assert event["usage"] is None
    assert ChunkFormatter("completion", "c", 1, "m").first(0) == b""


@pytest.mark.parametrize(("kind", "model"), [("chat", ChatCompletionChunk), ("completion", Completion)])
def test_the_usage_chunk_has_no_choices(kind, model):
    [event] = events(ChunkFormatter(kind, "c", 1, "m", include_usage=True).usage(Usage(2, 3)))
    chunk = strictly(model, event)
    assert chunk.choices == []
    assert chunk.usage.total_tokens == 5
    assert DONE == b"data: [DONE]\n\n"


def test_the_error_event_is_the_error_object():
    error = ApiError(500, "line one\nline two", code="invalid_logits")
    [event] = events(ChunkFormatter("chat", "c", 1, "m").error(error))
    assert event == {
        "error": {"message": "line one\nline two", "type": "server_error", "param": None, "code": "invalid_logits"}
    }


# Log-probabilities


def test_logprobs_of_an_echoed_prompt_and_its_answer():
    choice = ChoiceLogprobs(PIECES.__getitem__)
    entries = choice.prompt([0, 1], [TokenLogprobs([1, 4], [-0.5, -1.5])], "Hello")
    entries += choice.extend([TokenLogprobs([2, 2], [-math.inf, -0.25]), TokenLogprobs([3], [-1.0])])
    entries += choice.extend([TokenLogprobs([4], [-2.0])])
    body = orjson.loads(
        response_body("completion", "c", 1, "m", [Choice(0, "Hello 😀é", "stop", entries)], Usage(2, 3))
    )
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Hel", "lo", "bytes:\\x20\\xf0\\x9f", "bytes:\\x98\\x80", "é"],
        "token_logprobs": [None, -0.5, -9999.0, -1.0, -2.0],
        "top_logprobs": [
            None, {"é": -1.5, "lo": -0.5}, {"bytes:\\x20\\xf0\\x9f": -0.25}, {"bytes:\\x98\\x80": -1.0}, {"é": -2.0}
        ],
        # The smiley counts with the token that completes it.
        "text_offset": [0, 3, 5, 6, 7],
    }  # fmt: skip


@given(st.lists(scores(3), min_size=1, max_size=4))
def test_chat_logprobs_give_the_exact_bytes(groups):
    choice = ChoiceLogprobs(PIECES.__getitem__)
    entries = [entry for group in groups for entry in choice.extend(group)]
    body = orjson.loads(response_body("chat", "c", 1, "m", [Choice(0, "", "stop", entries)], Usage(1, 1)))
    content = strictly(ChatCompletion, body).choices[0].logprobs.content
    flat = [score for group in groups for score in group]
    assert len(content) == len(flat)
    for item, score in zip(content, flat, strict=True):
        assert bytes(item.bytes) == PIECES[score.token_ids[0]]
        assert item.logprob == max(score.logprobs[0], -9999.0)
        assert [bytes(top.bytes) for top in item.top_logprobs] == [PIECES[token] for token in score.token_ids[1:]]


@given(st.lists(TOKENS, max_size=12))
def test_offsets_point_into_the_text(tokens):
    entries = ChoiceLogprobs(PIECES.__getitem__).extend([TokenLogprobs([token], [-1.0]) for token in tokens])
    text = b"".join(PIECES[token] for token in tokens).decode("utf-8", "replace")
    offsets = [entry.offset for entry in entries]
    assert offsets == sorted(offsets)
    for token, offset in zip(tokens, offsets, strict=True):
        assert offset <= len(text)
        if token in (0, 1):  # plain ASCII: it must stand at its offset, unless an unfinished character waits before it
            assert PIECES[token].decode() in text[offset : offset + 4]


def test_hidden_tokens_take_no_room_in_the_text():
    entries = ChoiceLogprobs(PIECES.__getitem__, {1}).extend([TokenLogprobs([id], [-1.0]) for id in (0, 1, 0, 4)])
    assert [(entry.token, entry.offset) for entry in entries] == [
        (b"Hel", 0),
        (b"lo", 3),
        (b"Hel", 3),
        ("é".encode(), 6),
    ]


def test_not_a_number_never_reaches_json():
    entry = ChoiceLogprobs(PIECES.__getitem__).extend([TokenLogprobs([0, 1], [math.nan, math.nan])])[0]
    assert entry == TokenLogprob(b"Hel", -9999.0, entry.top, 0)
    assert entry.top[0].logprob == -9999.0


# Errors and models


def test_error_bodies_are_bounded_and_complete():
    for error in (
        invalid_request("x" * 10**6, "p" * 10**6),
        ApiError(429, "busy", retry_after=1.5),
        from_parameter_error(ParameterError("n must be less", "n")),
        internal_error(),
        generation_error("invalid_logits"),
        invalid_request("lone \ud800 surrogate"),
    ):
        assert len(error.body()) < 1200
        assert set(orjson.loads(error.body())["error"]) == {"message", "type", "param", "code"}
    assert ApiError(429, "busy", retry_after=1.5).retry_after == 1.5


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"), (404, "not_found_error"),
     (413, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error"), (503, "server_error")],
)  # fmt: skip
def test_the_type_follows_from_the_status(status, kind):
    assert ApiError(status, "x").type == kind


def test_models():
    adapters = Adapters(["a", "b/c"], NamedAdapters({}, None), None)
    body = orjson.loads(models_list(["a", "b/c"], 5, adapters))
    assert body["object"] == "list"
    assert [strictly(Model, item).id for item in body["data"]] == ["a", "b/c"]
    assert strictly(Model, orjson.loads(model_card("b/c", ["a", "b/c"], 5, adapters))).created == 5
    with pytest.raises(ApiError) as caught:
        model_card("x", ["a"], 5, adapters)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
