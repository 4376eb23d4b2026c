"""Keeps the text of special tokens in user-written strings from becoming special tokens.

Before a chat template is rendered, every user string gets a private mark before each character where a special token
begins, or may begin or end together with what the template writes next to it. After rendering, only unmarked special
tokens were written by the template. The marks survive what templates do to content (trim, concatenate, to JSON).
"""

import re
import secrets
import threading
from collections.abc import Iterable
from functools import cached_property

import tokenizers

_PRIVATE_FIRST, _PRIVATE_COUNT = 0xF0000, 0xFFFE


class SpecialTokenGuard:
    """Marks user strings, and encodes rendered text so that only unmarked special tokens are special."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special = {token.content: (token_id, token) for token_id, token in added.items() if token.special}
        words = list(self._special)
        self._longest = max(map(len, words), default=0)
        self._prefixes = {word[:end] for word in words for end in range(1, len(word))}
        self._suffixes = {word[start:] for word in words for start in range(1, len(word))}
        self._trie = trie_pattern(words)
        self._any = re.compile(self._trie)
        self._each = re.compile(f"(?={self._trie})")
        # Random, so that no user string can hold them.
        self._mark = _private_text()
        self._alias = _private_text()
        self._lock = threading.Lock()
        self.always = backend.normalizer is not None and any(token.normalized for _, token in self._special.values())
        """True where special tokens are matched in normalised text, which may differ from the text marked here."""

    def has_special(self, text: str) -> bool:
        """Whether the text of a special token is in `text`."""
        return self._any.search(text) is not None

    def mark(self, text: str) -> str:
        """`text` with a mark before each character that could begin or complete a special token."""
        if not text or not self._special:
            return text
        places = self._places(text)
        if not places:
            return text
        cuts = sorted(places)
        return self._mark.join(text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True))

    def is_marked(self, text: str) -> bool:
        """Whether `encode` must be used for this rendered text instead of plain encoding."""
        return self.always or self._mark in text

    def encode(self, rendered: str) -> list[int]:
        """Ids of a rendered text: its unmarked special tokens are special, the marked ones are plain text."""
        with self._lock:
            encoder, real_ids, aliases = self._aliased
        pattern = f"{self._mark}(.?)|({self._trie})"
        prepared = re.sub(pattern, lambda match: self._substitute(match, aliases), rendered, flags=re.DOTALL)
        ids = encoder.encode_batch_fast([prepared], add_special_tokens=False)[0].ids
        return [real_ids.get(token_id, token_id) for token_id in ids]

    def _places(self, text: str) -> set[int]:
        places = {match.start() for match in self._each.finditer(text)} if self.has_special(text) else set()
        reach = min(len(text), self._longest - 1)
        if any(text[:end] in self._suffixes for end in range(1, reach + 1)):
            places.add(0)
        places.update(start for start in range(len(text) - reach, len(text)) if text[start:] in self._prefixes)
        return places

    def _substitute(self, match: re.Match[str], aliases: dict[str, str]) -> str:
        special: str | None = match[2]
        if special is None:
            return str(match[1])
        beside = match.string[max(0, match.start() - 1) : match.start()] + match.string[match.end() : match.end() + 1]
        if self._special[special][1].single_word and re.search(r"\w", beside):
            return special
        return aliases[special]

    @cached_property
    def _aliased(self) -> tuple[tokenizers.Tokenizer, dict[int, int], dict[str, str]]:
        """A copy of the tokenizer that parses a secret alias in the place of every special token.

        Returned with the real id of each alias id, and the alias of each special token. The copy splits everything
        else exactly as the original does, so text keeps its ids.
        """
        aliases = {text: self._alias + chr(_PRIVATE_FIRST + i) for i, text in enumerate(self._special)}
        copy = tokenizers.Tokenizer.from_str(self._backend.to_str())
        copy.add_tokens([_renamed(token, aliases[text]) for text, (_, token) in self._special.items()])
        copy.encode_special_tokens = True
        text_of = {alias: text for text, alias in aliases.items()}
        added = copy.get_added_tokens_decoder().items()
        real_ids = {new: self._special[text_of[token.content]][0] for new, token in added if token.content in text_of}
        return copy, real_ids, aliases


def trie_pattern(words: Iterable[str]) -> str:
    """A pattern that matches the longest of `words`, trying each character once however many words there are."""
    root = _Trie()
    for word in words:
        node = root
        for char in word:
            node = node.setdefault(char, _Trie())
        node[""] = _Trie()  # a word ends here
    return _node_pattern(root) if root else "(?!)"


class _Trie(dict[str, "_Trie"]):
    """Next character -> what may follow it."""


def _node_pattern(node: _Trie) -> str:
    prefix = ""
    while len(node) == 1:
        [(char, node)] = node.items()
        prefix += re.escape(char)
    if not node:
        return prefix
    branches = "|".join(re.escape(char) + _node_pattern(below) for char, below in node.items() if char)
    return f"{prefix}(?:{branches}){'?' if '' in node else ''}"


def _renamed(token: tokenizers.AddedToken, text: str) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        text,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=False,
    )


def _private_text() -> str:
    return "".join(chr(_PRIVATE_FIRST + secrets.randbelow(_PRIVATE_COUNT)) for _ in range(8))
