"""Prompts of a wanted length: plain words, or words counted by a tokenizer until the length is exact."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bladellm_runtime.errors import ConfigError
from bladellm_tools.bench.words import WORDS

SALT_WORDS = 6
"""Random words at the start of a prompt: enough that no two prompts of a benchmark begin alike."""
LEAST_SINGLE_WORDS = 32
MOST_CORRECTIONS = 16
TEXTS_TOGETHER = 64
"""That are tokenized at a time, by all cores: what a tokenizer returns takes many times the memory of a text."""


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
        return self.draw_all([count], rng)[0]

    def draw_all(self, counts: Sequence[int], rng: np.random.Generator) -> list[str]:
        """A text of about so many tokens for each of `counts`."""
        return self.fit([" ".join(self._drawn(count, rng)) for count in counts], counts, rng)

    def fit(self, texts: Sequence[str], counts: Sequence[int], rng: np.random.Generator) -> list[str]:
        """The texts with words more or less at their ends, so that they have so many tokens; without a tokenizer, as
        they are."""
        return list(texts)

    def _drawn(self, count: int, rng: np.random.Generator) -> list[str]:
        return list(self._words[rng.integers(len(self._words), size=count)])


class TokenText(WordText):
    """Text of a wanted number of tokens, exact to one, the special tokens that the tokenizer adds included."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        single = [word for word in WORDS if len(self._ids(f"the {word} {word}")) - len(self._ids("the")) == 2]
        super().__init__(single if len(single) >= LEAST_SINGLE_WORDS else WORDS)

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def fit(self, texts: Sequence[str], counts: Sequence[int], rng: np.random.Generator) -> list[str]:
        """The texts with words more or less at their ends, so that they have so many tokens."""
        fitted = list(texts)
        for first in range(0, len(fitted), TEXTS_TOGETHER):
            self._correct(fitted, counts, range(first, min(first + TEXTS_TOGETHER, len(fitted))), rng)
        return fitted

    def _correct(
        self, texts: list[str], counts: Sequence[int], places: Sequence[int], rng: np.random.Generator
    ) -> None:
        """Make the texts in some places as long as they should be."""
        for _ in range(MOST_CORRECTIONS):
            encoded = self._tokenizer.encode_batch_fast([texts[place] for place in places])
            excesses = {place: len(found.ids) - counts[place] for place, found in zip(places, encoded, strict=True)}
            places = [place for place, excess in excesses.items() if excess]
            if not places:
                return
            for place in places:
                texts[place] = self._nearer(texts[place], counts[place], excesses[place], rng)

    def _nearer(self, text: str, count: int, excess: int, rng: np.random.Generator) -> str:
        """The text with words more or less, where it has `excess` tokens more than `count`."""
        words = text.split()
        if excess < 0:
            return " ".join([*words, *self._drawn(-excess, rng)])
        # A word may be several tokens: take away too few rather than too many, one at least.
        per_word = max(1.0, (count + excess) / len(words))
        return " ".join(words[: max(1, len(words) - max(1, int(excess / per_word)))])


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
