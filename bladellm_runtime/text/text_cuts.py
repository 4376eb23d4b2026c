"""Where a text may be cut so that the tokens of its parts, one part behind the other, are those of the whole.

The parts of a long prompt are tokenized side by side. That is exact where a tokenizer first splits a text by a pattern
into words, each of which has its own tokens, and the pattern splits there whatever is before and behind: a letter, then
a space or a mark that no pattern joins to it, then a letter again. Of the patterns known here

- none has a match that goes on from a letter to such a mark, so one ends there;
- none looks back, and only white space looks ahead, so what lies behind a cut changes no match before it, nor the other
  way round.

Letters are those that every version of Unicode and both engines of regular expressions take for letters, and that no
canonical normalisation joins to their neighbours.
"""

import json
import re
import unicodedata
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import tokenizers

LETTERS, MARKS = "A-Za-z\u4e00-\u9fa5", " \uff0c\u3002\u3001"
CUT = re.compile(f"(?<=[{LETTERS}])(?=[{MARKS}][{LETTERS}])")
ACROSS_CUT = re.compile(f"[{LETTERS}][{MARKS}]")
"""What an added token that a cut may divide has in it."""
PART_CHARACTERS = 1024
"""Of a part, at least: fewer are tokenized in the time that it takes to share them out."""
MOST_PARTS = 64

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = frozenset({_LLAMA3, _LLAMA3.replace("{1,3}", ""), _GPT2})
"""Of Llama 3, Qwen 2 to 3, and GPT-2."""


@dataclass(frozen=True, slots=True)
class TextCuts:
    """Tokenizes texts by parts. before, behind: the tokens that are put around a text."""

    backend: tokenizers.Tokenizer
    before: tuple[int, ...]
    behind: tuple[int, ...]

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer) -> Self | None:
        """None for a tokenizer of which it is not known that the tokens of parts are those of the whole."""
        if not _splits_into_words(backend) or any(map(_may_be_cut, backend.get_added_tokens_decoder().values())):
            return None
        probe = "probe"
        plain, around = (backend.encode(probe, add_special_tokens=special).ids for special in (False, True))
        place = next((at for at in range(len(around)) if around[at : at + len(plain)] == plain), None)
        if place is None:
            return None
        return cls(backend, tuple(around[:place]), tuple(around[place + len(plain) :]))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids that the backend has for the text; the parts of a long one are tokenized in threads."""
        encodings = self.backend.encode_batch_fast(parts_of(text), add_special_tokens=False)
        ids = list(chain.from_iterable(encoding.ids for encoding in encodings))
        return [*self.before, *ids, *self.behind] if add_special_tokens else ids


def parts_of(text: str, characters: int = PART_CHARACTERS, most: int = MOST_PARTS) -> list[str]:
    """The text in parts of about as many characters, no fewer than so many, cut only where that is exact."""
    size = max(characters, -(-len(text) // most))
    cuts = [0]
    for wanted in range(size, len(text) - size + 1, size):
        found = CUT.search(text, max(wanted, cuts[-1] + 1), wanted + size)
        if found is not None:
            cuts.append(found.start())
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _splits_into_words(backend: tokenizers.Tokenizer) -> bool:
    """Whether one of `PATTERNS` makes words of a text, whose bytes are then tokenized word by word."""
    normalizer = _state(backend.normalizer)
    if normalizer is not None and normalizer.get("type") != "NFC":
        return False
    match _state(backend.pre_tokenizer):
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return True  # by the pattern of GPT-2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern in PATTERNS
    return False


def _may_be_cut(token: tokenizers.AddedToken) -> bool:
    """Whether an added token looks at what is beside it, or may lie on both sides of a cut."""
    content = unicodedata.normalize("NFC", token.content)
    return token.lstrip or token.rstrip or token.single_word or ACROSS_CUT.search(content) is not None


def _state(part: Any) -> dict[str, Any] | None:
    """What tokenizer.json says of a normalizer or pre-tokenizer."""
    return None if part is None else json.loads(part.__getstate__())
