"""The bytes that one token stands for, whatever its neighbours are.

Text is produced from bytes and not from decoded strings because a character may be spread over several tokens; the
bytes of a token never change when more tokens follow, the decoded string does.
"""

import json
import re
from typing import Any

import tokenizers

from bladellm_runtime.errors import CheckpointError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "▁"


class TokenBytes:
    """Looks up token bytes for the two kinds of tokenizer that language models use.

    *Byte-level* (GPT-2, Llama 3, Qwen): every character of a token stands for a byte. *Sentencepiece-style* (Llama 2,
    Mistral): `▁` stands for a space, `<0xE4>` for a byte. A decoder of another kind is a `CheckpointError`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: str) -> None:
        self._tokenizer = tokenizer
        steps = _decoder_steps(tokenizer, source)
        self._char_bytes = _byte_level_alphabet() if any(step["type"] == "ByteLevel" for step in steps) else None
        self._byte_fallback = any(step["type"] == "ByteFallback" for step in steps)
        self._replacements = [_replacement(step, source) for step in steps if step["type"] in ("Replace", "Metaspace")]
        self.strips_first_space = any(
            step["type"] == "Strip" or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
        """Whether decoding removes the space before the first word of a text."""
        self._cache: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id the tokenizer does not know (models pad their vocabulary)."""
        found = self._cache.get(token_id)
        if found is None:
            token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
            if token is None:
                return b""  # not cached: the cache stays as small as the vocabulary
            found = self._cache[token_id] = self._convert(token)
        return found

    def _convert(self, token: str) -> bytes:
        if self._char_bytes is not None:
            try:
                return bytes([self._char_bytes[char] for char in token])
            except KeyError:  # an added token, written as plain text
                return token.encode()
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if match:
            return bytes([int(match[1], 16)])
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode()


def _decoder_steps(tokenizer: tokenizers.Tokenizer, source: str) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        raise CheckpointError(f"{source} has no decoder; use a tokenizer whose file says how tokens become text")
    spec: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    known = {"ByteLevel"}, {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not any({step["type"] for step in steps} <= kind for kind in known):
        raise CheckpointError(
            f"{source} has a decoder of type {spec['type']}; byte-level and sentencepiece-style decoders are supported"
        )
    for step in steps:
        if step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) != (" ", 1, 0):
            raise CheckpointError(f"{source} has a decoder that strips something other than one leading space")
    return steps


def _replacement(step: dict[str, Any], source: str) -> tuple[str, str]:
    if step["type"] == "Metaspace":
        return step.get("replacement", _SPACE), " "
    if "String" not in step["pattern"]:
        raise CheckpointError(f"{source} has a decoder that replaces a pattern; only plain strings are supported")
    return step["pattern"]["String"], step["content"]


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 is itself, the rest is moved up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
