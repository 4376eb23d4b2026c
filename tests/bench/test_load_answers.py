"""Reading streamed answers: the splitter, the tokens of chunks, the ways an answer can end."""

import json
import random
from collections import deque
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bladellm_tools.bench.answer import AnswerReader, spread
from bladellm_tools.bench.client import PART_OVERHEAD_BYTES, Answer, Memory
from bladellm_tools.bench.records import Outcome, RequestRecord
from bladellm_tools.bench.sse import EventTooLongError, SseSplitter

LINES = st.lists(
    st.tuples(
        st.sampled_from(["data: ", "data:", "event: ", ": ", "id: ", "retry:", "data", "unknown: ", ""]),
        st.text(alphabet="ab:{} \u00e4", max_size=6),
        st.sampled_from(["\n", "\r\n", "\r"]),
    ),
    max_size=30,
)


def events_by_the_standard(text: str) -> list[bytes]:
    """The data of all events, line by line as the standard has it; the end of the text ends an event."""
    found, data = [], []
    for line in [*text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), ""]:
        name, _, value = line.partition(":")
        if line == "":
            found += ["\n".join(data)] if data else []
            data = []
        elif name == "data":
            data.append(value.removeprefix(" "))
    return [event.encode() for event in found]


def split(text: bytes, cuts: list[int]) -> list[bytes]:
    """The splitter's events when the text comes in pieces."""
    splitter = SseSplitter()
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    found = [event for a, b in pairwise(places) for event in splitter.feed(text[a:b])]
    return found + splitter.finish()


@given(LINES, st.lists(st.integers(0, 300), max_size=40))
def test_the_splitter_finds_the_same_events_in_any_pieces(lines: list[tuple[str, str, str]], cuts: list[int]) -> None:
    text = "".join("".join(line) for line in lines)
    assert split(text.encode(), cuts) == events_by_the_standard(text)
    assert split(text.encode(), list(range(len(text.encode())))) == events_by_the_standard(text)


def test_the_splitter_remembers_what_is_no_event_and_bounds_what_has_no_end() -> None:
    splitter = SseSplitter()
    assert splitter.feed(b"<html>\n<body>x</body>\n\n") == []
    assert splitter.stray.startswith(b"<html>")
    with pytest.raises(EventTooLongError):
        deque((splitter.feed(b"data: " + b"x" * 10**5) for _ in range(100)), maxlen=0)


def event(content: object) -> bytes:
    return b"data: " + (content if isinstance(content, bytes) else json.dumps(content).encode()) + b"\n\n"


def text_chunk(text: str, finish: str | None = None, **fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields}


def chat_chunk(finish: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def read(*parts: bytes, failure: tuple[Outcome, str] | None = None, tokenizer: object = None) -> RequestRecord:
    """The record of an answer whose parts come at times 1, 2, 3..."""
    record = RequestRecord(0, 0.0)
    reader = AnswerReader(record, keep_text=tokenizer is not None)
    for number, part in enumerate(parts):
        reader.feed(number + 1.0, part)
    record.ended = len(parts) + 1.0
    reader.finish(failure, tokenizer)
    return record


DONE = event(b"[DONE]")


def test_only_content_is_a_token() -> None:
    record = read(
        b": keep-alive\n\n",
        event(chat_chunk(role="assistant", content="")),
        event(chat_chunk(reasoning_content="hm")),
        event(chat_chunk(content="a", role="assistant")),
        event(chat_chunk(tool_calls=[{"index": 0, "function": {"arguments": "{"}}])),
        event(chat_chunk("stop")),
        event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}),
        DONE,
    )
    assert record.first_chunk == 1.0
    assert record.times == [3.0, 4.0, 5.0]
    assert record.tokens == [1, 1, 1]
    assert (record.outcome, record.finish_reason, record.counted_by) == (Outcome.OK, "stop", "usage")
    assert (record.prompt_tokens, record.completion_tokens) == (7, 3)


def test_tokens_of_chunks_follow_running_counts_where_a_server_gives_them() -> None:
    counts = [1, 5, 6, 9]
    parts = [event(text_chunk("xyz", usage={"completion_tokens": count})) for count in counts]
    assert read(*parts, DONE).tokens == [1, 4, 1, 3]


def test_cached_tokens_are_read() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 8}}
    assert read(event(text_chunk("a", usage=usage)), DONE).cached_tokens == 8


def test_counts_that_are_none_are_not_stored() -> None:
    usage = {"prompt_tokens": True, "completion_tokens": 2.5, "prompt_tokens_details": {"cached_tokens": True}}
    record = read(event(text_chunk("a", usage=usage)), DONE)
    counts = (record.prompt_tokens, record.completion_tokens, record.cached_tokens)
    assert counts == (0, 1, 0)
    assert not any(isinstance(count, bool) for count in counts)


class Letters:
    """A tokenizer with a token a letter."""

    def encode(self, text: str, add_special_tokens: bool) -> object:
        assert not add_special_tokens
        return type("Encoding", (), {"ids": list(text)})


def test_without_usage_the_tokenizer_counts_and_without_it_the_chunks() -> None:
    parts = [event(text_chunk("abcd")), event(text_chunk("ef", "stop")), DONE]
    by_tokenizer, by_chunks = read(*parts, tokenizer=Letters()), read(*parts)
    assert (by_tokenizer.completion_tokens, by_tokenizer.counted_by) == (6, "tokenizer")
    assert by_tokenizer.tokens == [4, 2]
    assert (by_chunks.completion_tokens, by_chunks.counted_by, by_chunks.tokens) == (2, "chunks", [1, 1])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(0, 300))
def test_spread_keeps_the_sum_and_gives_every_chunk_one_where_it_can(sizes: list[int], tokens: int) -> None:
    shares = spread(tokens, sizes)
    assert sum(shares) == tokens
    assert len(shares) == len(sizes)
    assert min(shares) >= (1 if tokens >= len(sizes) else 0)


LOST = (Outcome.CUT, "lost")
ENDINGS = [
    ([event(text_chunk("a", "stop")), DONE], None, Outcome.OK),
    ([event(text_chunk("a")), DONE], None, Outcome.OK),
    ([event(text_chunk("a", "stop"))], None, Outcome.OK),
    ([event(text_chunk("a")), b"data: [DONE]"], None, Outcome.OK),
    ([event(text_chunk("a", "stop")), DONE], LOST, Outcome.OK),
    ([event(text_chunk("a", "stop")) + DONE + b"junk"], None, Outcome.OK),
    ([event(text_chunk("a"))], None, Outcome.CUT),
    ([event(text_chunk("a"))], LOST, Outcome.CUT),
    ([event(text_chunk("a"))], (Outcome.TIMEOUT, "late"), Outcome.TIMEOUT),
    ([], None, Outcome.CUT),
    ([event(text_chunk("a")), event({"error": {"message": "boom"}}), DONE], None, Outcome.STREAM_ERROR),
    ([event({"error": "boom"})], None, Outcome.STREAM_ERROR),
    ([event({"object": "error", "message": "boom", "code": 400}), DONE], None, Outcome.STREAM_ERROR),
    ([event(b""), event(text_chunk("a", "stop")), b"data:\n\n", DONE], None, Outcome.OK),
    ([event(text_chunk("a", "abort")), DONE], None, Outcome.STREAM_ERROR),
    ([event(text_chunk("a")), event(b"{broken")], None, Outcome.GARBAGE),
    ([event(b"[1, 2]")], None, Outcome.GARBAGE),
    ([b"<html>not yours</html>\n\n"], None, Outcome.GARBAGE),
    ([json.dumps({"choices": [{"text": "all at once"}]}).encode()], None, Outcome.GARBAGE),
]


@pytest.mark.parametrize(("parts", "failure", "outcome"), ENDINGS)
def test_how_an_answer_ended(parts: list[bytes], failure: tuple[Outcome, str] | None, outcome: Outcome) -> None:
    record = read(*parts, failure=failure)
    assert record.outcome is outcome
    assert (record.error is None) == (outcome is Outcome.OK)


ODD = [None, True, 0, -1, 1e300, "x", "", [], {}, [[]], [None], {"error": None}, {"usage": 3}, {"choices": {}}]


def odd(draw: random.Random, depth: int = 3) -> object:
    """Random JSON with the keys of an answer in odd places."""
    if depth == 0 or draw.random() < 0.3:
        return draw.choice(ODD)
    keys = ["choices", "delta", "text", "content", "usage", "finish_reason", "completion_tokens", "tool_calls", "error"]
    if draw.random() < 0.3:
        return [odd(draw, depth - 1) for _ in range(draw.randrange(3))]
    return {draw.choice(keys): odd(draw, depth - 1) for _ in range(draw.randrange(5))}


def test_no_answer_makes_the_reader_raise() -> None:
    draw = random.Random()
    seen = set()
    for _ in range(3000):
        parts = [event(odd(draw)) for _ in range(3)]
        record = read(*parts, DONE, tokenizer=Letters())
        assert len(record.tokens) == len(record.times)
        seen.add(record.outcome)
    assert {Outcome.OK, Outcome.STREAM_ERROR, Outcome.GARBAGE} <= seen


@pytest.mark.parametrize("room", [0, 2 * PART_OVERHEAD_BYTES, 10**6])
def test_an_answer_reads_the_same_whatever_memory_there_is(room: int) -> None:
    """Parts that are kept for later and parts read at once must not change places."""
    memory = Memory(room)
    answer = Answer(RequestRecord(0, 0.0), memory)
    texts = [event(text_chunk(f"{number} ")) for number in range(10)]
    whole = b"".join(texts) + event({"choices": [], "usage": {"completion_tokens": 10}}) + DONE
    for number in range(0, len(whole), 37):
        answer.take(float(number), whole[number : number + 37])
    answer.read_kept()
    answer.reader.finish(None)
    assert answer.record.outcome is Outcome.OK
    assert answer.record.completion_tokens == len(answer.record.times) == 10
    assert answer.record.times == sorted(answer.record.times)
    assert memory.left == room
