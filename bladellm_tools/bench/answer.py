"""What a streamed answer says: its tokens and when they came, its usage, and how it ended."""

from typing import Any

import orjson

from bladellm_tools.bench.records import Outcome, RequestRecord
from bladellm_tools.bench.sse import EventTooLongError, SseSplitter

DONE = b"[DONE]"
FAILED_FINISHES = ("error", "abort")
MAX_ERROR_TEXT = 200
DELTA_TEXTS = ("content", "reasoning_content", "reasoning")


class AnswerReader:
    """Reads one answer part by part into its record.

    Only chunks with text, reasoning or a tool call are tokens: the role chunk of a chat and the usage chunk are not.
    `texts` keeps the text where a tokenizer will count it, `sizes` its length a chunk.
    """

    def __init__(self, record: RequestRecord, keep_text: bool = False) -> None:
        self._record = record
        self._splitter = SseSplitter()
        self._running_counts: list[int] = []
        self._usage: dict[str, Any] = {}
        self._sizes: list[int] = []
        self._texts: list[str] | None = [] if keep_text else None
        self._failure: tuple[Outcome, str] | None = None
        self._done = False

    def feed(self, now: float, part: bytes) -> None:
        """One part of the body, and when it came. What follows a failure is not read."""
        if self._failure is not None:
            return
        if self._record.first_chunk is None:
            self._record.first_chunk = now
        try:
            events = self._splitter.feed(part)
        except EventTooLongError as error:
            self._failure = (Outcome.GARBAGE, str(error))
            return
        for data in events:
            self._read_event(now, data)

    def finish(self, failure: tuple[Outcome, str] | None, tokenizer: Any = None) -> None:
        """The body has ended, by itself or by a failure of the transport: settle outcome and token counts."""
        record = self._record
        if record.first_chunk is not None and self._failure is None:
            for data in self._splitter.finish():
                self._read_event(record.ended or record.first_chunk, data, is_whole=False)
        record.outcome, record.error = self._ending(failure)
        self._count(tokenizer)

    def _ending(self, failure: tuple[Outcome, str] | None) -> tuple[Outcome, str | None]:
        """An answer that was complete is fine, whatever the connection did then; else the first thing that failed."""
        if self._failure is not None:
            return self._failure
        if self._done or (self._record.finish_reason is not None and failure is None):
            return Outcome.OK, None
        if failure is not None:
            return failure
        if self._splitter.stray and not self._record.times:
            return Outcome.GARBAGE, f"not an event stream: {shorten(self._splitter.stray)}"
        return Outcome.CUT, "the stream ended without finish_reason and [DONE]"

    def _read_event(self, now: float, data: bytes, is_whole: bool = True) -> None:
        """Take one event in; what is left of one that the end of the stream cut in two is no garbage."""
        if self._failure is not None or self._done or not data.strip():  # an empty event keeps a connection open
            return
        if data == DONE:
            self._done = True
            return
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            if is_whole:
                self._failure = (Outcome.GARBAGE, f"an event that is not JSON: {shorten(data)}")
            return
        if not isinstance(event, dict):
            self._failure = (Outcome.GARBAGE, f"an event that is not an object: {shorten(data)}")
        elif event.get("error") or event.get("object") == "error":
            self._failure = (Outcome.STREAM_ERROR, error_text(event.get("error") or event))
        else:
            self._read_chunk(now, event)

    def _read_chunk(self, now: float, event: dict[str, Any]) -> None:
        usage = event.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        choices = event.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict):
            return
        text = choice_text(choice)
        if text:
            self._record.times.append(now)
            self._sizes.append(len(text))
            self._running_counts.append(whole(self._usage.get("completion_tokens")) if usage else 0)
            if self._texts is not None:
                self._texts.append(text)
        if isinstance(reason := choice.get("finish_reason"), str):
            self._record.finish_reason = reason
            if reason in FAILED_FINISHES:
                self._failure = (Outcome.STREAM_ERROR, f"finish_reason {reason}")

    def _count(self, tokenizer: Any) -> None:
        """Token counts: the server's, else the tokenizer's, else one a chunk; and how many each chunk held."""
        record = self._record
        record.prompt_tokens = whole(self._usage.get("prompt_tokens")) or record.prompt_tokens
        details = self._usage.get("prompt_tokens_details")
        record.cached_tokens = whole(details.get("cached_tokens")) if isinstance(details, dict) else 0
        reported = whole(self._usage.get("completion_tokens"))
        if reported:
            record.completion_tokens, record.counted_by = reported, "usage"
        elif tokenizer is not None and self._texts:
            text = "".join(self._texts)
            record.completion_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
            record.counted_by = "tokenizer"
        else:
            record.completion_tokens, record.counted_by = len(record.times), "chunks"
        record.tokens = steps(self._running_counts) or spread(record.completion_tokens, self._sizes)


def choice_text(choice: dict[str, Any]) -> str:
    """The text a chunk adds, of whatever kind; empty where it adds none."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        text = choice.get("text")
        return text if isinstance(text, str) else ""
    for name in DELTA_TEXTS:
        if isinstance(text := delta.get(name), str) and text:
            return text
    calls = delta.get("tool_calls")
    return str(calls) if calls else ""


def steps(running: list[int]) -> list[int]:
    """Tokens of each chunk from running counts; empty unless every chunk reported a higher one."""
    counts = [after - before for before, after in zip([0, *running], running, strict=False)]
    return counts if all(count > 0 for count in counts) else []


def spread(tokens: int, sizes: list[int]) -> list[int]:
    """`tokens` over chunks of text of these lengths: one each, and what is more than that by length.

    Their sum is `tokens`, also where there are fewer tokens than chunks.
    """
    count, length = len(sizes), sum(sizes)
    if not count or tokens == count:
        return [1] * count
    base, extra = (1, tokens - count) if tokens > count else (0, tokens)
    shares, before, reached = [], 0, 0
    for size in sizes:
        reached += size
        after = (2 * extra * reached + length) // (2 * length)
        shares.append(base + after - before)
        before = after
    return shares


def whole(value: Any) -> int:
    """A count as the server wrote it; 0 for anything that is none."""
    return value if type(value) is int and value > 0 else 0  # true is no count


def error_text(error: Any) -> str:
    """The message of an OpenAI error object, or what stands in its place."""
    message = error.get("message") if isinstance(error, dict) else error
    return shorten(str(message if message is not None else error).encode(errors="replace"))


def shorten(data: bytes) -> str:
    """The beginning of some bytes on one printable line."""
    text = " ".join(data[:MAX_ERROR_TEXT].decode(errors="replace").split())
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
