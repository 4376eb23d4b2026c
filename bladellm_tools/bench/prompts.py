"""Prompts of a wanted length: plain words, or words counted by a tokenizer until the length is exact."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.words import WORDS

SALT_WORDS = 6
"""Random words at the start of a prompt: enough that no two prompts of a benchmark begin alike."""
LEAST_SINGLE_WORDS = 32
MOST_CORRECTIONS = 16


@functools.lru_cache(maxsize=4)
def load_tokenizer(folder: str) -> Any:
    """The `tokenizers.Tokenizer` of a folder. Raises `ConfigError` where there is none."""
    from tokenizers import Tokenizer

    path = Path(folder) / "tokenizer.json" if Path(folder).is_dir() else Path(folder)
    if not path.is_file():
        raise ConfigError(f"--tokenizer {folder} has no tokenizer.json; give a model folder that has one")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"--tokenizer {path} cannot be read: {error}") from error


class WordText:
    """Text of a wanted number of words. A word is about a token: the server's own count is what a report shows."""

    def __init__(self, words: list[str] = WORDS) -> None:
        self._words = np.array(words)

    def draw(self, count: int, rng: np.random.Generator) -> str:
        """About `count` tokens of text."""
        return " ".join(self._words[rng.integers(len(self._words), size=count)])


class TokenText(WordText):
    """Text of a wanted number of tokens, exact to one, the special tokens that the tokenizer adds included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        single = [word for word in WORDS if len(self._ids(f"the {word} {word}")) - len(self._ids("the")) == 2]
        super().__init__(single if len(single) >= LEAST_SINGLE_WORDS else WORDS)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def draw(self, count: int, rng: np.random.Generator) -> str:
        """`count` tokens of text."""
        words = super().draw(count, rng).split()
        for _ in range(MOST_CORRECTIONS):
            excess = len(self._ids(" ".join(words))) - count
            if excess == 0:
                break
            if excess < 0:
                words += super().draw(-excess, rng).split()
            else:
                # A word may be several tokens: take away too few rather than too many, one at least.
                per_word = max(1.0, (count + excess) / len(words))
                words = words[: max(1, len(words) - max(1, int(excess / per_word)))]
        return " ".join(words)


def text_maker(tokenizer: str | None) -> WordText:
    """Who makes the prompts: exact with the folder of a tokenizer, estimated without."""
    return WordText() if tokenizer is None else TokenText(load_tokenizer(tokenizer))


def salt(rng: np.random.Generator) -> str:
    """Words that make the start of a prompt its own."""
    return PLAIN.draw(SALT_WORDS, rng)


def renewed(prompt: str, index: int) -> str:
    """A copy of a prompt that begins differently, for a closed loop that has come to the end of its plan."""
    return f"{salt(np.random.default_rng(index))} {prompt}"


PLAIN = WordText()
