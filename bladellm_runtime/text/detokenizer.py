"""Tokens to text as they arrive, a whole character at a time."""

from codecs import utf_8_decode
from collections.abc import Iterable

from bladellm_runtime.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns a stream of token ids into text.

    A character whose bytes come in several tokens is held back until it is complete; bytes that can no longer become a
    character are U+FFFD, by the rule of the WHATWG encoding standard. All texts joined are the text of all tokens.

    `at_start` says that nothing with a text precedes the tokens. Elsewhere the space before the first word is kept:
    prompt and answer joined are then the text of their tokens joined.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, at_start: bool = False) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._held = b""
        self._strip_space = at_start and tokenizer.strips_first_space
        self.independent = not self._strip_space
        """Whether the text of a token that is whole characters is what it would be on its own."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that is complete once these tokens are known; maybe empty."""
        token_bytes, skipped = self._token_bytes, self._skipped
        data = self._held + b"".join([token_bytes(token) for token in token_ids if token not in skipped])
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        self.independent = not (self._held or self._strip_space)
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed, else nothing."""
        held, self._held = self._held, b""
        return held.decode(errors="replace")
