import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_runtime.request import Constraint, ConstraintKind, FinishReason
from bladellm_runtime.text.stream import TextDelta, TextStream
from bladellm_runtime.wire.messages import RequestDelta, TokenLogprobs
from tests.text.samples import add_request, any_text, demo, sentencepiece, split_randomly

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = 2


def deltas(ids, seed, finish):
    """The engine's deltas for these tokens, the last one with `finish`; every token has a log-probability."""
    pieces = [piece for piece in split_randomly(ids, seed) if piece] or [[]]
    out = []
    for piece in pieces:
        logprobs = [TokenLogprobs([token, 0], [-1.0, -2.0]) for token in piece]
        out.append(RequestDelta(1, piece, logprobs=logprobs))
    out[-1].finish = finish
    return out


def follow(stream, parts):
    """All text deltas up to the end, as the server sees them, joined into one."""
    total = TextDelta(logprobs=[])
    for part in parts:
        delta = stream.feed(part)
        assert len(delta.logprobs or []) == len(delta.tokens)
        total.text += delta.text
        total.tokens += delta.tokens
        total.logprobs += delta.logprobs or []
        if delta.finish is not None:
            total.finish, total.stop_reason, total.error = delta.finish, delta.stop_reason, delta.error
            break
    assert [entry.token_ids[0] for entry in total.logprobs] == total.tokens
    assert stream.completion_tokens == len(total.tokens)
    return total


@given(any_text, st.integers(0, 9), st.sampled_from([STOP, LENGTH]), st.booleans())
def test_without_stop_strings_the_text_is_the_decode(text, seed, finish, skip):
    ids = demo().encode(text) + [EOS] * (finish is STOP)
    stream = TextStream(demo(), add_request(skip_special_tokens=skip))
    total = follow(stream, deltas(ids, seed, finish))
    assert (total.text, total.finish, total.stop_reason) == (text, finish, None)
    assert total.tokens == ids
    assert stream.finished
    assert not stream.stopped_early


@given(
    any_text,
    st.lists(st.text("ab😀é <|\n", min_size=1, max_size=4), min_size=1, max_size=4),
    st.integers(0, 9),
    st.sampled_from([STOP, LENGTH, None]),
    st.booleans(),
    st.integers(0, 5),
)
def test_stop_strings_cut_text_and_count_tokens_exactly(text, stops, seed, finish, include, min_tokens):
    text += "ab😀é 😀<|"
    ids = demo().encode(text) + [EOS] * (finish is STOP)
    request = add_request(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, ignore_eos=True)
    stream = TextStream(demo(), request)
    total = follow(stream, deltas(ids, seed, finish))
    expected = cut_by_definition(ids[: len(ids) - (finish is STOP)], stops, include, min_tokens)
    if expected is None:
        assert (total.finish, total.stop_reason, total.tokens) == (finish, None, ids)
        assert total.text == text if finish is not None or include else text.startswith(total.text)
        return
    assert (total.text, total.stop_reason, len(total.tokens)) == expected
    assert total.finish is STOP
    assert stream.finished


def cut_by_definition(ids, stops, include, min_tokens):
    """(text, stop string, tokens): decode one more token at a time and look for a stop string in what it adds."""
    for count in range(min_tokens + 1, len(ids) + 1):
        before = complete(ids[: count - 1])
        now = complete(ids[:count])
        for end in range(len(before) + 1, len(now) + 1):
            found = [stop for stop in stops if now[:end].endswith(stop)]
            if found:
                stop = max(found, key=len)
                return now[: end if include else end - len(stop)], stop, count
    return None


def complete(ids):
    """The text of `ids` up to the last complete character."""
    data = b"".join(map(demo().token_bytes, ids))
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
    raise AssertionError("not the beginning of a text")


def test_a_stop_string_in_a_running_request_asks_for_an_abort():
    ids = demo().encode("one two three four")
    stream = TextStream(demo(), add_request(stop=("two",)))
    total = follow(stream, [RequestDelta(1, [token], logprobs=[TokenLogprobs([token], [0.0])]) for token in ids])
    assert (total.text, total.stop_reason) == ("one ", "two")
    assert stream.stopped_early
    counted = stream.completion_tokens
    assert stream.feed(RequestDelta(1, ids, STOP)) == TextDelta()
    assert stream.completion_tokens == counted < len(ids)


@pytest.mark.parametrize(("min_tokens", "text", "count"), [(0, "", 2), (1, "", 2), (2, "a,", 4), (3, "a,", 4)])
def test_stop_strings_within_the_first_min_tokens_do_not_count(min_tokens, text, count):
    comma, a = demo().encode(","), demo().encode("a")
    assert len(comma) == len(a) == 1
    stream = TextStream(demo(), add_request(stop=("a,",), min_tokens=min_tokens))
    total = follow(stream, deltas((a + comma) * 3, 0, LENGTH))
    assert (total.text, total.stop_reason, stream.completion_tokens) == (text, "a,", count)


def test_a_stop_string_in_the_engines_last_delta_needs_no_abort():
    ids = demo().encode("one two three")
    for finish in (LENGTH, STOP, FinishReason.ERROR):
        stream = TextStream(demo(), add_request(stop=("two",)))
        delta = stream.feed(RequestDelta(1, [*ids, EOS], finish, error="x" if finish is FinishReason.ERROR else None))
        assert (delta.text, delta.finish, delta.stop_reason, delta.error) == ("one ", STOP, "two", None)
        assert not stream.stopped_early


@pytest.mark.parametrize(
    ("params", "last", "text", "reason"),
    [
        ({}, EOS, "hi", None),
        ({"skip_special_tokens": False}, EOS, "hi", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, EOS, "hi<|im_end|>", None),
        ({"include_stop_str_in_output": True}, EOS, "hi", None),
        ({"stop_token_ids": (68,)}, 68, "hi", 68),
        ({"stop_token_ids": (68,), "include_stop_str_in_output": True}, 68, "hia", 68),
        ({"stop_token_ids": (68,)}, EOS, "hi", None),
        ({"stop_token_ids": (EOS,), "ignore_eos": True}, EOS, "hi", EOS),
    ],
)
def test_the_token_that_ends_the_answer_counts_but_is_not_shown(params, last, text, reason):
    for stop in ((), ("zzz", "his")):
        stream = TextStream(demo(), add_request(stop=stop, **params))
        delta = stream.feed(RequestDelta(1, [*demo().encode("hi"), last], STOP))
        assert (delta.text, delta.finish, delta.stop_reason) == (text, STOP, reason)
        assert delta.tokens[-1] == last
        assert stream.completion_tokens == len(delta.tokens) == 3


def test_what_is_held_back_comes_at_the_end_but_not_after_an_abort():
    half = demo().encode("\U0001f9ff")[:1]
    for finish, text in ((LENGTH, "ab�"), (FinishReason.ABORT, ""), (FinishReason.ERROR, "")):
        stream = TextStream(demo(), add_request(stop=("abc",)))
        assert stream.feed(RequestDelta(1, demo().encode("ab"))).text == ""
        last = stream.feed(RequestDelta(1, half, finish, error="invalid_logits"))
        assert (last.text, last.finish) == (text, finish)
        assert last.error == "invalid_logits"
        assert stream.finished


def test_the_space_before_an_answer_depends_on_the_prompt():
    answer = sentencepiece().encode("the cat")
    for prompt, text in (([1, 5 + 255], " the cat"), ([1], "the cat"), ([1, 2], "the cat")):
        stream = TextStream(sentencepiece(), add_request(prompt))
        assert stream.feed(RequestDelta(1, answer, LENGTH)).text == text
    stream = TextStream(sentencepiece(), add_request([1], skip_special_tokens=False))
    assert stream.feed(RequestDelta(1, answer, LENGTH)).text == " the cat"


def test_a_constrained_answer_is_the_bytes_of_its_tokens():
    """No space of the first word is taken away, and a cut inside a character leaves the beginning of a valid text."""
    constraint = Constraint(ConstraintKind.REGEX, " the cat", "guided_regex")
    request = msgspec.structs.replace(add_request([1]), constraint=constraint)
    stream = TextStream(sentencepiece(), request)
    assert stream.feed(RequestDelta(1, sentencepiece().encode("the cat"), LENGTH)).text == " the cat"
    half = demo().encode("ab\U0001f9ff")[:-1]
    stream = TextStream(demo(), request)
    assert stream.feed(RequestDelta(1, half)).text + stream.feed(RequestDelta(1, [], LENGTH)).text == "ab"


def test_an_empty_last_delta_ends_the_stream():
    for finish in FinishReason:
        stream = TextStream(demo(), add_request(stop=("x",)))
        assert stream.feed(RequestDelta(1, [], finish)) == TextDelta(finish=finish)
        assert stream.finished
