"""`TextStream`: the deltas of one running request become text, cut at stop strings."""

from dataclasses import dataclass, field

from bladellm_runtime.request import FinishReason
from bladellm_runtime.text.detokenizer import Detokenizer
from bladellm_runtime.text.stop import StopMatcher
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.messages import AddRequest, RequestDelta, TokenLogprobs


@dataclass(slots=True)
class TextDelta:
    """What one `RequestDelta` adds to the answer.

    `text` lags behind `tokens` while a character is incomplete or may begin a stop string. `logprobs` has one entry a
    token. `stop_reason` is the stop string, or the id of `stop_token_ids`, that ended the answer; None for an
    end-of-sequence token.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class TextStream:
    """Follows one choice of a request from its first token to its end.

    `completion_tokens` counts every generated token up to the one that ended the answer, which is included: the token
    that completed a stop string, the stop token or the end-of-sequence token. `stopped_early` becomes True when a stop
    string ended the answer while the engine still runs it: the caller then aborts the request.
    """

    def __init__(self, tokenizer: Tokenizer, request: AddRequest) -> None:
        self._params = request.params
        skip = request.params.skip_special_tokens
        # A constraint is on every byte of the answer: no first space is taken away, half a character is no text.
        self._exact = request.constraint is not None
        # A prompt of skipped tokens has no text, so the answer is where the text starts.
        at_start = skip and not self._exact and all(token in tokenizer.special_ids for token in request.prompt)
        self._detokenizer = Detokenizer(tokenizer, skip, at_start)
        stops = request.params.stop
        self._stops = StopMatcher(stops, request.params.include_stop_str_in_output) if stops else None
        self.completion_tokens = 0
        self.stopped_early = False
        self.finished = False

    @property
    def independent(self) -> bool:
        """Whether the next token, if it is whole characters, adds what it says on its own, and need not be fed."""
        return self._stops is None and self._detokenizer.independent

    def feed(self, delta: RequestDelta) -> TextDelta:
        """Take the next delta of the engine; after the end every delta is answered by an empty one."""
        if self.finished:
            return TextDelta()
        if delta.finish is None and self._stops is None:
            # So are nearly all deltas; the rest of this class costs twice as much.
            self.completion_tokens += len(delta.tokens)
            return TextDelta(self._detokenizer.feed(delta.tokens), delta.tokens, delta.logprobs)
        out = TextDelta(finish=delta.finish, error=delta.error)
        used = self._take(delta, out)
        self.completion_tokens += used
        out.tokens = delta.tokens[:used]
        if delta.logprobs is not None:
            out.logprobs = delta.logprobs[:used]
        self.finished = out.finish is not None
        return out

    def _take(self, delta: RequestDelta, out: TextDelta) -> int:
        """Put the text of the delta and how it ended into `out`; returns how many of its tokens count."""
        ended_by_token = delta.finish is FinishReason.STOP and bool(delta.tokens)
        hidden = int(ended_by_token and not self._params.include_stop_str_in_output)
        visible = delta.tokens[: len(delta.tokens) - hidden]
        used = self._decode(visible, out)
        if used is None and delta.finish in (FinishReason.STOP, FinishReason.LENGTH):
            used = self._flush(out, len(visible))
        if used is not None:
            out.finish, out.error = FinishReason.STOP, None
            self.stopped_early = delta.finish is None
            return used
        if ended_by_token and delta.tokens[-1] in self._params.stop_token_ids:
            out.stop_reason = delta.tokens[-1]
        return len(delta.tokens)

    def _decode(self, tokens: list[int], out: TextDelta) -> int | None:
        """Add the text of `tokens`; returns the number of tokens up to a stop string's end, None without one."""
        if self._stops is None:
            out.text = self._detokenizer.feed(tokens)
            return None
        for index, token in enumerate(tokens, start=1):
            armed = self.completion_tokens + index > self._params.min_tokens
            if self._push(self._stops, self._detokenizer.feed((token,)), armed, out):
                return index
        return None

    def _flush(self, out: TextDelta, tokens: int) -> int | None:
        """Add everything held back; returns `tokens` if that completes a stop string."""
        rest = "" if self._exact else self._detokenizer.flush()
        if self._stops is None:
            out.text += rest
            return None
        armed = self.completion_tokens + tokens > self._params.min_tokens
        if self._push(self._stops, rest, armed, out):
            return tokens
        out.text += self._stops.flush()
        return None

    def _push(self, stops: StopMatcher, text: str, armed: bool, out: TextDelta) -> bool:
        safe, out.stop_reason = stops.feed(text, armed=armed)
        out.text += safe
        return out.stop_reason is not None
