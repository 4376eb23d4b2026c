"""Mask rows inside JSON strings of which few characters are left.

llguidance refuses every longer token there, one after another. But the row of such a place is that of all plain texts
of so many characters, which depends on nothing else, and of the few thousand tokens with a quote, a backslash or a part
of a character. Those come from a second matcher, over a vocabulary of them and of single bytes, that follows the text.

How many characters are left is what the library itself says of a text that nothing but such a string takes; see
`schema_strings.lengths_alone_matter`, without which none of this applies.
"""

import re

import llguidance
import numpy as np

from bladellm_runtime.guided.llguidance_tokenizer import tokenizer_of
from bladellm_runtime.guided.schema_strings import PROBE
from bladellm_runtime.guided.vocabulary import Row, Vocabulary, packed

MOST_LEFT = 16
"""With more characters left, few tokens are too long."""
_MOST_BEHIND = 16
"""Tokens that the second matcher is behind at most, so that no row has to make up for a long text."""
PLAIN = r'[^"\\\x00-\x1F\x7F\x{85}\x{2028}\x{2029}]'
_PLAIN_TEXT = re.compile(re.sub(r"\\x\{(\w+)\}", lambda code: rf"\u{code[1]:0>4}", PLAIN) + "+")


class ShortStrings:
    """What all constraints over one vocabulary share. Use it only where it `is_usable`."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        lengths = np.fromiter(map(_plain_length, vocabulary.pieces), np.int64, len(vocabulary.pieces))
        self.bytes = {piece[0]: token for token, piece in enumerate(vocabulary.pieces) if len(piece) == 1}
        self.pieces = vocabulary.pieces
        self.is_usable = set(b"".join(vocabulary.pieces)) <= self.bytes.keys()
        self.is_usable &= all(byte in self.bytes for byte in PROBE.encode())
        self._others = packed(lengths == 0)
        self._plain = [packed((lengths > 0) & (lengths <= left)) for left in range(MOST_LEFT)]
        self._probe = [self.bytes[byte] for byte in PROBE.encode() * MOST_LEFT] if self.is_usable else []
        pieces = [b"" if length and len(piece) > 1 else piece
                  for piece, length in zip(vocabulary.pieces, lengths.tolist(), strict=True)]  # fmt: skip
        self.tokenizer = tokenizer_of(Vocabulary(tuple(pieces), vocabulary.end_ids), [])

    def left(self, matcher: llguidance.LLMatcher) -> int:
        """How many characters of a short string are left; 0 at any other place."""
        taken = matcher.validate_tokens(self._probe)
        return taken // len(PROBE.encode()) if taken < len(self._probe) else 0

    def complete(self, row: Row, left: int) -> None:
        """From the second matcher's row to that of all tokens."""
        np.bitwise_and(row, self._others, out=row)
        np.bitwise_or(row, self._plain[left], out=row)


class Follower:
    """The second matcher of one sequence. It takes tokens in only when a row is asked for, or when many have come."""

    def __init__(self, first: llguidance.LLMatcher, shared: ShortStrings) -> None:
        self._first, self._shared = first, shared
        self._matcher: llguidance.LLMatcher | None = None
        self._behind: list[int] = []
        """Tokens that the matcher has not taken in."""
        self._taken: list[int] = []
        """Bytes of each token that it has."""
        self.left, self._is_lost = 0, False

    def at_the_beginning(self) -> "Follower":
        """One for another sequence."""
        return Follower(self._first, self._shared)

    def accept(self, token: int) -> None:
        """Follow a token that the first matcher took."""
        self._behind.append(token)
        if len(self._behind) >= _MOST_BEHIND:
            self._catch_up()

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        unread = min(count, len(self._behind))
        del self._behind[len(self._behind) - unread :]
        undone = [self._taken.pop() for _ in range(count - unread)]
        if self._matcher is not None and undone:
            self._matcher.rollback(sum(undone))

    def filler(self, first: llguidance.LLMatcher) -> llguidance.LLMatcher:
        """The matcher to fill the next row with: this one's in a short string, else the `first`."""
        self.left = 0 if self._is_lost else self._shared.left(first)
        return self._catch_up() if self.left else first

    def complete(self, row: Row) -> bool:
        """Make the row that `filler` filled that of all tokens. False where the library gave up on it."""
        if not self.left:
            return True
        if self._is_lost or self._matcher is None or self._matcher.is_error():
            return False
        self._shared.complete(row, self.left)
        return True

    def _catch_up(self) -> llguidance.LLMatcher:
        if self._matcher is None:
            self._matcher = self._first.deep_copy()
        pieces = [self._shared.pieces[token] for token in self._behind]
        text = [self._shared.bytes[byte] for byte in b"".join(pieces)]
        self._is_lost |= bool(text) and self._matcher.try_consume_tokens(text) < len(text)
        self._taken += map(len, pieces)
        self._behind.clear()
        return self._matcher


def _plain_length(piece: bytes) -> int:
    """Characters of a piece of plain text; 0 for any other."""
    try:
        text = piece.decode()
    except UnicodeDecodeError:
        return 0
    return len(text) if _PLAIN_TEXT.fullmatch(text) else 0
