"""Log-probabilities in OpenAI's two shapes: a list of objects for chat, four parallel lists for completions."""

import codecs
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

from bladellm_runtime.wire.messages import TokenLogprobs

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot write."""


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One of the most likely tokens at a position, as its bytes."""

    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the answer: its bytes, its log-probability, and the most likely tokens there, best first.

    `logprob` is None for the first token of an echoed prompt, which nothing precedes. `offset` is where the token's
    text starts in the answer, in characters.
    """

    token: bytes
    logprob: float | None
    top: tuple[TopLogprob, ...]
    offset: int


class ChoiceLogprobs:
    """Turns the engine's token ids of one choice into text, in order; keeps the offset reached.

    `token_bytes` gives the bytes of a token id, empty for an id without any. `special` are the ids of special tokens;
    with `skip_special` what is generated leaves them out: they are listed, but take no room in the text.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], special: Container[int] = (), *, skip_special: bool = True
    ) -> None:
        self._token_bytes = token_bytes
        self._special = special
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def prompt(self, token_ids: Sequence[int], scores: Sequence[TokenLogprobs], text: str) -> list[TokenLogprob]:
        """A prompt echoed as `text`: `scores` has one entry a token from the second on.

        The text has its special tokens or not: a text prompt those that were written in it, but not those put around.
        """
        if not token_ids:
            return []
        first = self._entry(token_ids[0], None, (), self._is_in(text, token_ids[0]))
        return [first, *(self._scored(score, self._is_in(text, score.token_ids[0])) for score in scores)]

    def extend(self, scores: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
        """The next generated tokens."""
        return [
            self._scored(score, not (self._skip_special and score.token_ids[0] in self._special)) for score in scores
        ]

    def _is_in(self, text: str, token_id: int) -> bool:
        """Whether the text goes on with this token, which it does with any that is not special."""
        if token_id not in self._special:
            return True
        return text.startswith(self._token_bytes(token_id).decode(errors="replace"), self._offset)

    def _scored(self, score: TokenLogprobs, shown: bool) -> TokenLogprob:
        return self._entry(score.token_ids[0], score.logprobs[0], self._top(score), shown)

    def _entry(self, token_id: int, logprob: float | None, top: tuple[TopLogprob, ...], shown: bool) -> TokenLogprob:
        token = self._token_bytes(token_id)
        entry = TokenLogprob(token, None if logprob is None else _finite(logprob), top, self._offset)
        if shown:
            # Incremental: a character split over tokens counts once, with its last token.
            self._offset += len(self._decoder.decode(token))
        return entry

    def _top(self, score: TokenLogprobs) -> tuple[TopLogprob, ...]:
        pairs = zip(score.token_ids[1:], score.logprobs[1:], strict=True)
        return tuple(TopLogprob(self._token_bytes(token_id), _finite(logprob)) for token_id, logprob in pairs)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice. A token that is not valid UTF-8 shows U+FFFD; `bytes` is exact."""
    content = []
    for entry in entries:
        item = _chat_token(entry.token, LOWEST_LOGPROB if entry.logprob is None else entry.logprob)
        item["top_logprobs"] = [_chat_token(top.token, top.logprob) for top in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a completion choice. `top_logprobs` has the chosen token too, as OpenAI's does."""
    return {
        "tokens": [_completion_token(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [_completion_top(entry) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def _chat_token(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(token)}


def _completion_token(token: bytes) -> str:
    """The text, or `bytes:\\xf0\\x9f` for a piece of a character: these names are keys, so they must stay distinct."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _completion_top(entry: TokenLogprob) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    found: dict[str, float] = {}
    for top in entry.top:
        # Two ids may have the same text; the list is best first.
        found.setdefault(_completion_token(top.token), top.logprob)
    found.setdefault(_completion_token(entry.token), entry.logprob)
    return found


def _finite(logprob: float) -> float:
    # Written so that NaN takes the else branch too.
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
