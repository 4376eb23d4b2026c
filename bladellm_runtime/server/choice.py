"""One choice of a running request: from the engine's deltas to pieces of its answer, and its times."""

from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from bladellm_runtime.request import FinishReason
from bladellm_runtime.server.limits import Failure
from bladellm_runtime.server.logprobs import ChoiceLogprobs, TokenLogprob
from bladellm_runtime.server.metrics import Metrics
from bladellm_runtime.text.stream import TextDelta, TextStream
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.messages import AddRequest, RequestDelta


class TextWriter(Protocol):
    """Writes events of a stream that differ in their text alone."""

    def write(self, text: bytes) -> bool:
        """Write an event with this JSON string, and return True; or return False at once if that would have to wait."""


@dataclass(slots=True)
class Piece:
    """A part of a choice's answer; neighbours are merged while the client is slow."""

    text: str
    logprobs: list[TokenLogprob] | None = None
    finish: FinishReason | None = None

    def merge(self, later: "Piece") -> None:
        """Append the piece that follows."""
        self.text += later.text
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.finish = later.finish


class RunningChoice:
    """Follows one choice. `on_delta` is its sink: it hands each piece on, and why the choice failed if it did.

    `on_token` is its sink for single tokens. While `write` is set it writes what most of them say at once, and hands
    nothing on.
    """

    __slots__ = (
        "_emit",
        "_json",
        "_last_at",
        "_logprobs",
        "_metrics",
        "_scheduled_at",
        "_stream",
        "_written",
        "cached_tokens",
        "echo",
        "first_at",
        "index",
        "request",
        "write",
    )

    def __init__(
        self,
        index: int,
        request: AddRequest,
        echo: str | None,
        tokenizer: Tokenizer,
        metrics: Metrics,
        emit: Callable[["RunningChoice", Piece, Failure | None], None],
    ) -> None:
        self.index = index
        self.request = request
        self.echo = echo
        self.first_at = 0.0
        self.cached_tokens = 0
        self.write: TextWriter | None = None
        """For plain choices alone, while nothing waits to be written."""
        self._emit = emit
        self._metrics = metrics
        self._stream = TextStream(tokenizer, request)
        self._json = tokenizer.token_json(request.params.skip_special_tokens)
        self._written = 0
        self._logprobs: ChoiceLogprobs | None = None
        if request.params.logprobs is not None:
            self._logprobs = ChoiceLogprobs(
                tokenizer.token_bytes, tokenizer.special_ids, skip_special=request.params.skip_special_tokens
            )
        self._scheduled_at = 0.0
        self._last_at = 0.0

    @property
    def plain(self) -> bool:
        """Whether its next token may be written without a piece."""
        return self._stream.independent and self._logprobs is None

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far."""
        return self._stream.completion_tokens + self._written

    @property
    def finished(self) -> bool:
        """True after the last delta."""
        return self._stream.finished

    @property
    def stopped_early(self) -> bool:
        """True when a stop string ended the choice and the engine does not know yet."""
        return self._stream.stopped_early

    def on_token(self, token: int, at: float) -> None:
        """Take one more token of a step that came at `at`; `on_delta` would do the same, at several times the cost."""
        write = self.write
        if write is not None:
            text = self._json[token]
            if text is not None and _written(write, text):
                self._written += 1
                self._metrics.token_times.append(at - self._last_at)
                self._last_at = at
                return
        self.on_delta(RequestDelta(self.request.request_id, [token]))

    def on_delta(self, delta: RequestDelta) -> None:
        """Take the next delta of the engine."""
        text = self._stream.feed(delta)
        self._clock(len(text.tokens), delta.scheduled_at)
        if delta.cached_tokens is not None:
            self.cached_tokens = delta.cached_tokens
        piece = Piece(text.text, None, text.finish)
        if self._logprobs is not None:
            piece.logprobs = self._read_logprobs(self._logprobs, delta, text)
        if self.echo is not None:
            piece.text = self.echo + piece.text
            self.echo = None
        if text.finish is not None:
            self._count_end(text.finish)
        self._emit(self, piece, self._failure(delta) if text.finish in _FAILED else None)

    def _failure(self, delta: RequestDelta) -> Failure:
        """Why the choice ended without an answer, and the request field to change, where one is to blame."""
        constraint = self.request.constraint
        blamed = constraint.field if constraint is not None and delta.error == "constraint_refused" else None
        if delta.error == "adapter_refused":
            blamed = "model"
        return Failure(delta.error or str(delta.finish), delta.message, blamed)

    def _read_logprobs(self, logprobs: ChoiceLogprobs, delta: RequestDelta, text: TextDelta) -> list[TokenLogprob]:
        entries: list[TokenLogprob] = []
        if self.echo is not None:
            entries += logprobs.prompt(self.request.prompt, delta.prompt_logprobs or [], self.echo)
        return entries + logprobs.extend(text.logprobs or [])

    def _clock(self, tokens: int, scheduled_at: float | None) -> None:
        """Note when tokens came."""
        if scheduled_at is not None:
            self._scheduled_at = scheduled_at
        if not tokens:
            return
        now = monotonic()
        if self._last_at:
            self._metrics.inter_token_latency.observe(now - self._last_at)
        else:
            self.first_at = now
            self._metrics.time_to_first_token.observe(now - self.request.arrival)
            if self._scheduled_at:
                self._metrics.queue_time.observe(self._scheduled_at - self.request.arrival)
                self._metrics.prefill_time.observe(now - self._scheduled_at)
        self._last_at = now

    def _count_end(self, finish: FinishReason) -> None:
        metrics, tokens = self._metrics, self.completion_tokens
        metrics.finished[finish.value] += 1
        if finish in _FAILED:
            return
        metrics.latency.observe(monotonic() - self.request.arrival)
        metrics.prompt_length.observe(len(self.request.prompt))
        metrics.answer_length.observe(tokens)
        metrics.decode_time.observe(self._last_at - self.first_at)
        if self._scheduled_at:
            metrics.inference_time.observe(self._last_at - self._scheduled_at)
        if tokens > 1:
            metrics.time_per_output_token.observe((self._last_at - self.first_at) / (tokens - 1))


def _written(writer: TextWriter, text: bytes) -> bool:
    try:
        return writer.write(text)
    except Exception:
        return False  # It is tried again at the end of the step, where a request that fails is ended.


_FAILED = (FinishReason.ERROR, FinishReason.ABORT)
