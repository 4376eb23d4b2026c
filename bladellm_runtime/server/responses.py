"""Answers as bytes: whole bodies, and server-sent events with everything but the text formatted in advance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.logprobs import TokenLogprob, chat_logprobs, completion_logprobs

Kind = Literal["chat", "completion"]
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written by a request, all its prompts and choices together.

    cached_tokens: those of the prompts that the prompt cache had before the request came.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished answer. `logprobs` is None unless the request asked for them."""

    index: int
    text: str
    finish_reason: str
    logprobs: Sequence[TokenLogprob] | None = None


def response_body(kind: Kind, id: str, created: int, model: str, choices: Sequence[Choice], usage: Usage) -> bytes:
    """The body of a request that does not stream; the choices may come in any order."""
    build = _chat_choice if kind == "chat" else _completion_choice
    return orjson.dumps(
        {
            "id": id,
            "object": "chat.completion" if kind == "chat" else "text_completion",
            "created": created,
            "model": model,
            "choices": [build(choice) for choice in sorted(choices, key=lambda choice: choice.index)],
            "usage": usage.as_dict(),
        }
    )


def _chat_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": None if choice.logprobs is None else chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _completion_choice(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logprobs is None else completion_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


class ChunkFormatter:
    """Formats the events of one stream. Each method returns the bytes of one event.

    A chunk is `head index middle text tail`, of which only the index and the text change from chunk to chunk.
    With `include_usage` each chunk carries `usage`, null unless it is given. An event stream ends with `DONE`.
    """

    def __init__(
        self,
        kind: Kind,
        id: str,
        created: int,
        model: str,
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._chat = kind == "chat"
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        object_name = "chat.completion.chunk" if self._chat else "text_completion"
        top = orjson.dumps({"id": id, "object": object_name, "created": created, "model": model})
        self._head = b"data: " + top[:-1] + b',"choices":['
        self._prefixes: dict[int, bytes] = {}
        self._before_text = b',"delta":{"content":' if self._chat else b',"text":'
        self._after_text = b"}" if self._chat else b""
        self._tail = self._end(None)
        self._plain_tail = self._after_text + b',"logprobs":null,"finish_reason":null}' + self._tail

    def first(self, index: int) -> bytes:
        """The chunk that opens a choice: the role for chat, nothing for completions, which have no such chunk."""
        if not self._chat:
            return b""
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        return b'%b{"index":%d%b%b' % (self._head, index, delta, self._tail)

    def delta(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob] | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """A chunk with the next text of a choice. `usage` so far is shown with continuous usage only."""
        prefix = self._prefixes.get(index) or self._prefix(index)
        if logprobs is None and finish_reason is None and usage is None:
            return prefix + orjson.dumps(text) + self._plain_tail
        return b"".join(
            (
                prefix,
                orjson.dumps(text),
                self._after_text,
                b',"logprobs":',
                self._logprobs(logprobs),
                b',"finish_reason":',
                orjson.dumps(finish_reason),
                b"}",
                self._end(usage) if self._continuous_usage else self._tail,
            )
        )

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """What comes before and after the JSON of the text in a `delta` of nothing else."""
        return self._prefixes.get(index) or self._prefix(index), self._plain_tail

    def usage(self, usage: Usage) -> bytes:
        """The last chunk when the request asked for usage: no choices."""
        return self._head + b'],"usage":' + orjson.dumps(usage.as_dict()) + b"}\n\n"

    def error(self, error: ApiError) -> bytes:
        """The event that ends a stream which cannot go on; clients raise on it."""
        return b"data: " + error.body() + b"\n\n"

    def _prefix(self, index: int) -> bytes:
        prefix = b'%b{"index":%d%b' % (self._head, index, self._before_text)
        self._prefixes[index] = prefix
        return prefix

    def _end(self, usage: Usage | None) -> bytes:
        """What follows the only choice of a chunk."""
        if not self._include_usage:
            return b"]}\n\n"
        return b'],"usage":' + orjson.dumps(usage.as_dict() if usage else None) + b"}\n\n"

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> bytes:
        if entries is None:
            return b"null"
        return orjson.dumps(chat_logprobs(entries) if self._chat else completion_logprobs(entries))
