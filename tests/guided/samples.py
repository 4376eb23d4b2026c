"""A small byte-level vocabulary with longer pieces, schemas, patterns, and random texts that a matcher allows."""

import random
from typing import cast

import numpy as np
import pytest

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.guided.backend import Backend, Compiled, Matcher
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.constraint import constraint_of
from bladellm_runtime.guided.vocabulary import Vocabulary, allowed_tokens
from bladellm_runtime.request import Constraint

END = 7
WORDS = ('{"', '":', '": "', '"}', '",', " ", "  ", "true", "name", "age", "a", "ab", "abc", "aba", "é", "日本",
         "12", "3.", "0", "255", ".",
         "skills", "\\n", "\\u", "][", "}}", "false", "nul", "-", "1e", "com", "\n\n")  # fmt: skip
IPV4 = r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"
PROFILE = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3},
        "work history": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "company": {"type": "string"},
                    "duration": {"type": "string"},
                    "position": {"type": "string"},
                },
                "required": ["company", "position"],
            },
        },
    },
    "required": ["name", "age", "skills", "work history"],
}


def small_vocabulary() -> Vocabulary:
    """Special tokens in between, every byte, pieces of several characters and of parts of one, padding at the end."""
    pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"\xe6\x97", b"\xa5\xe6"]
    return Vocabulary((*[b""] * 10, *pieces, *[b""] * 5), (END, 3))


def compiled(backend: Backend, **fields: object) -> Compiled:
    constraint = constraint_of(fields)
    assert constraint is not None
    return backend.compile(constraint, float("inf"))


def refusal(compiler: Compiler, **fields: object) -> str:
    """The one sentence that refuses a constraint, be it in form or when compiled; fails where it is accepted."""
    with pytest.raises(ParameterError) as caught:
        compiler.compile(cast(Constraint, constraint_of(fields)))
    assert caught.value.param in fields
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    return str(caught.value)


def write(
    matcher: Matcher, vocabulary: Vocabulary, rng: random.Random, limit: int, ending: float = 0.5
) -> bytes | None:
    """Random allowed tokens until the end, mostly short ones; None where `limit` tokens do not reach it."""
    row, text = np.zeros(vocabulary.words, np.int32), b""
    lengths = np.fromiter(map(len, vocabulary.pieces), np.int64)
    for _ in range(limit):
        matcher.fill_mask(row)
        allowed = allowed_tokens(row)
        assert len(allowed)
        assert all(lengths[token] > 0 or token in vocabulary.end_ids for token in allowed)
        assert matcher.may_end == (vocabulary.end_ids[0] in allowed)
        if matcher.may_end and (matcher.is_done or rng.random() < ending):
            assert matcher.accept(vocabulary.end_ids[0])
            assert matcher.is_done
            return text
        texts = allowed[lengths[allowed] > 0]
        closing = texts[np.isin(texts, [10 + byte for byte in b'"}],:0'])]
        choice = closing if len(closing) and rng.random() < 0.4 else texts
        token = int(choice[rng.randrange(len(choice))])
        assert matcher.accept(token)
        text += vocabulary.pieces[token]
    return None


def spelled(matcher: Matcher, text: bytes) -> bool:
    """Whether the whole text, a byte a token, is accepted as complete."""
    return all(matcher.accept(10 + byte) for byte in text) and matcher.may_end
