"""What the engine without a model says and remembers: tokens by arithmetic, prompts by checksums."""

import re
import zlib
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

DEMO_MODEL = Path(__file__).parents[2] / "recipes" / "models" / "demo"
GRANULE_TOKENS = 16


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@cache
def words() -> list[int]:
    """The tokens that are a space and ASCII letters: any sequence of them decodes to plain words."""
    vocab = tokenizer().get_vocab()
    return sorted(token for text, token in vocab.items() if re.fullmatch(r"Ġ[A-Za-z]+", text))


def key_of(prompt: list[int], choice: int) -> int:
    """What the tokens of an answer depend on, beside their position."""
    return zlib.crc32(b"".join(token.to_bytes(4, "little") for token in prompt)) ^ (choice * 0x9E3779B1)


def token_at(key: int, position: int) -> int:
    return words()[((key + 7919 * position) * 2654435761 >> 7) % len(words())]


def expected_tokens(prompt: list[int], count: int, choice: int = 0, adapter: int = 0) -> list[int]:
    """The tokens this engine generates for a prompt without a command. adapter: its checksum."""
    return [token_at(key_of(prompt, choice) ^ adapter, position) for position in range(count)]


def expected_text(prompt: list[int], count: int, choice: int = 0, adapter: int = 0) -> str:
    """The text of `expected_tokens`, put together from the vocabulary, without a decoder."""
    tokens = expected_tokens(prompt, count, choice, adapter)
    return "".join(tokenizer().id_to_token(token).replace("Ġ", " ") for token in tokens)


def granules(tokens: int) -> int:
    return -(-tokens // GRANULE_TOKENS)


class PromptMemory:
    """Which prompts were seen, in whole granules."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, int]] = set()

    def enter(self, prompt: list[int], salt: str) -> int:
        """Tokens at the start of a prompt that were seen with this salt; the last token always has to be computed."""
        checksum, known, whole = 0, 0, (len(prompt) - 1) // GRANULE_TOKENS * GRANULE_TOKENS
        for start in range(0, whole, GRANULE_TOKENS):
            granule = prompt[start : start + GRANULE_TOKENS]
            checksum = zlib.crc32(b"".join(token.to_bytes(4, "little") for token in granule), checksum)
            if known == start and (salt, checksum) in self._seen:
                known = start + GRANULE_TOKENS
            self._seen.add((salt, checksum))
        return known
