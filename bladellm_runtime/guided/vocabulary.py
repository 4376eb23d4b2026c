"""`Vocabulary`: the bytes of every token, as constraints see them."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.text.tokenizer import Tokenizer

Row = npt.NDArray[np.int32]
"""[words] int32: bit `token % 32` of word `token // 32` says that the token is allowed."""
Masks = npt.NDArray[np.int32]
"""[rows, words] int32, contiguous: a mask row for each sequence of a batch."""


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[token]` are the bytes of a token; none for special tokens and for ids that only pad the model.

    A token without bytes is never allowed, except `end_ids`, which are allowed where the text may end.
    """

    pieces: tuple[bytes, ...]
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]] | None = field(default=None, compare=False, repr=False)
    """The tokenizer's way to write a text, without special tokens, if known: where the text is forced, back ends may
    allow only that."""

    @property
    def words(self) -> int:
        """int32 words of one mask row."""
        return -(-len(self.pieces) // 32)

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal vocabularies."""
        digest = hashlib.sha256(repr(sorted(self.end_ids)).encode())
        for piece in self.pieces:
            digest.update(len(piece).to_bytes(4, "little") + piece)
        return digest.hexdigest()

    @cached_property
    def usable(self) -> Row:
        """[words] int32: the tokens that may be allowed at all."""
        return packed(np.fromiter(map(len, self.pieces), np.int64, len(self.pieces)) > 0) | self.ends

    @cached_property
    def ends(self) -> Row:
        """[words] int32: the end tokens."""
        chosen = np.zeros(len(self.pieces), np.bool_)
        chosen[list(self.end_ids)] = True
        return packed(chosen)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, end_ids: Iterable[int] | None = None) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` logits. `end_ids` are those of the tokenizer unless given.

    Raises `ConfigError` without an end token: a guided text could not end.
    """
    ends = tuple(sorted({token for token in end_ids or tokenizer.eos_token_ids if 0 <= token < vocab_size}))
    if not ends:
        raise ConfigError("guided decoding needs an end token; set eos_token_id in generation_config.json")
    hidden = tokenizer.special_ids.union(ends)
    pieces = tuple(b"" if token in hidden else tokenizer.token_bytes(token) for token in range(vocab_size))
    return Vocabulary(pieces, ends, tokenizer.encode_plain)


def packed(chosen: npt.NDArray[np.bool_]) -> Row:
    """[tokens] bool -> [words] int32 mask row."""
    bits = np.packbits(chosen, bitorder="little")
    return np.pad(bits, (0, -len(bits) % 4)).view(np.int32)


def allowed_tokens(row: Row) -> npt.NDArray[np.intp]:
    """The token ids whose bit is set, ascending."""
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))


def forced_token(row: Row) -> int | None:
    """The only allowed token, if there is one: any sampler picks it, so the model need not be asked."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    word = int(row[words[0]]) & 0xFFFFFFFF
    return None if word & (word - 1) else int(words[0]) * 32 + word.bit_length() - 1
