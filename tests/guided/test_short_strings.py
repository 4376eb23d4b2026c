"""Rows filled by other means than the library's own walk over all tokens are the same, bit for bit."""

import json
import random
from typing import Any

import llguidance
import numpy as np
import pytest

from bladellm_runtime.guided import schema_strings
from bladellm_runtime.guided.backend import MatcherError
from bladellm_runtime.guided.constraint import ConstraintError, constraint_of
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend, LlguidanceCompiled, LlguidanceMatcher
from bladellm_runtime.guided.llguidance_grammar import Grammar, grammar_of
from bladellm_runtime.guided.llguidance_tokenizer import tokenizer_of
from bladellm_runtime.guided.short_strings import Follower, ShortStrings
from bladellm_runtime.guided.vocabulary import Vocabulary, allowed_tokens
from tests.guided.samples import END

PLAIN = ("ab", "abc", " word", "é", "éé", "日本", "日本語", "𝄞", "𝄞a", " of a", "longer text", "sixteen letters!",
         "more than sixteen letters", "12", "0.", "true", "name", "\ue000", "\ue000a", "\U0010ffff", "\x85a",
         "a\u2028")  # fmt: skip
CROSSING = ('"', '",', '","', '": "', '"}', 'a"', 'ab"]', ' word",', '日"', "\\", "\\n", "a\\", '\\"', "\\\\", "\\u00",
            "a\n", '"a', '{"', '[{"', '"b":', '": ["')  # fmt: skip
PARTS = (b"\xe6\x97", b"\xa5\xe6", b"a\xe6", b'\xa5"', b"\x9d\x84", b"\xf0\x9d", b"\xee\x80", b"\x80\x80", b"\xc3",
         b"\xa9a")  # fmt: skip
PATTERNS = ("^[a-z]{1,3}$", "^\\d+$", "^(ab|abc)*$", "^[a-z ]{2,9}$", "[a-z]cole", "a+", "a.*b", "^a.*b", "b$", "^.*b$",
            "a|b", ".", "^.{1,4}$", "[^a]", "\\S", "(^a|b$)", "\\d.*\\d.*a", "^$", "ab?c*", "(a.*)*b")  # fmt: skip


def vocabulary() -> Vocabulary:
    pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in (*PLAIN, *CROSSING)] + list(PARTS)
    return Vocabulary((*[b""] * 10, *pieces, *[b""] * 5), (END, 3))


def reference(vocabulary: Vocabulary, grammar: Grammar) -> LlguidanceMatcher:
    """Of the library alone: no slices, no second matcher, no alternatives beside the patterns."""
    return LlguidanceCompiled(library(vocabulary, grammar.simpler or grammar), vocabulary, 0, None).matcher()


def library(vocabulary: Vocabulary, grammar: Grammar) -> llguidance.LLMatcher:
    text = ("" if vocabulary.encode else '%llguidance {"no_forcing": true}\n') + grammar.text
    return llguidance.LLMatcher(tokenizer_of(vocabulary, []), text, log_level=0)


def random_string(rng: random.Random) -> dict[str, Any]:
    low, high = rng.choice((0, 0, 1, 3)), rng.choice((0, 1, 2, 3, 5, 9, 14, 17, 40))
    schema: dict[str, Any] = {"type": rng.choice(("string", "string", ["string", "null"]))}
    if rng.random() < 0.8:
        schema["maxLength"] = low + high
    if rng.random() < 0.5:
        schema["minLength"] = low
    return schema


def random_exact(rng: random.Random) -> dict[str, Any]:
    kinds = ("pattern", "pattern", "format", "enum", "const")
    kind = rng.choice(kinds)
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(PATTERNS)} | ({"minLength": 3} if rng.random() < 0.3 else {})
    if kind == "format":
        return {"type": "string", "format": rng.choice(("date", "uuid", "uri", "email", "hostname"))}
    words = rng.sample(("abc", "ab", "ab word", "日本語", "longer text of many words", ""), 3)
    return {"enum": words} if kind == "enum" else {"const": words[0]}


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """Mostly strings of limited length, beside and among all that may look like one."""
    chance = rng.random()
    if not depth or chance < 0.35:
        return random_string(rng) if rng.random() < 0.75 else random_exact(rng)
    if chance < 0.55:
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randint(0, 2)}
    if chance < 0.7:
        keyword = rng.choice(("anyOf", "anyOf", "allOf", "oneOf"))
        beside = {"maxLength": 7} if rng.random() < 0.2 else {}
        parts = [random_schema(rng, depth - 1) for _ in range(2)]
        return {keyword: parts if rng.random() < 0.6 else [random_string(rng), random_exact(rng)]} | beside
    if chance < 0.75:
        return {"$ref": "#/$defs/part"} | ({"maxLength": 4} if rng.random() < 0.3 else {})
    names = rng.sample(("a", "ab", "name", "日本語", "longer text"), rng.randint(1, 3))
    schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
    schema["required"] = names[: rng.randint(0, 3)]
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice((False, random_schema(rng, depth - 1)))
    if rng.random() < 0.1:
        schema["patternProperties"] = {rng.choice(PATTERNS): random_schema(rng, depth - 1)}
    if rng.random() < 0.1:
        schema |= {"maxLength": 5}
    return schema


def with_parts(rng: random.Random) -> dict[str, Any]:
    return random_schema(rng) | {"$defs": {"part": random_schema(rng, 1) | {"description": "no reference to itself"}}}


def follow(backend: LlguidanceBackend, schema: dict[str, Any], rng: random.Random, steps: int) -> int:
    """Random texts with undone steps, each row compared; how many came from the second matcher. -1: refused."""
    constraint = constraint_of({"guided_json": json.loads(json.dumps(schema))})
    assert constraint is not None
    try:
        ready = backend.compile(constraint, float("inf"))
    except ConstraintError:
        return -1
    grammar, words = grammar_of(constraint), backend.vocabulary.words
    pairs = [(ready.matcher(), reference(backend.vocabulary, grammar)) for _ in range(3)]
    masks, quick, expected, texts = np.zeros((3, words), np.int32), 0, np.zeros(words, np.int32), [[], [], []]
    for _ in range(steps):
        errors = backend.fill_masks([own for own, _ in pairs], masks, range(3))
        for (own, other), row, text, error in zip(pairs, masks, texts, errors, strict=True):
            assert (error is None) == (other_error(other, expected) is None), (schema, text)
            if error is not None:
                return quick
            assert (row == expected).all(), (schema, text, difference(backend.vocabulary, row, expected))
            quick += own.follower is not None and own.follower.left > 0
            step(own, other, row, rng, backend.vocabulary, text)
    return quick


def other_error(matcher: LlguidanceMatcher, row: np.ndarray) -> MatcherError | None:
    try:
        matcher.fill_mask(row)
    except MatcherError as error:
        return error
    return None


def difference(vocabulary: Vocabulary, row: np.ndarray, expected: np.ndarray) -> list[bytes]:
    return [vocabulary.pieces[token] for token in allowed_tokens(row ^ expected)][:9]


def step(own: Any, other: Any, row: np.ndarray, rng: random.Random, vocabulary: Vocabulary, text: list[bytes]) -> None:
    """Both matchers a token on, or some back; at times one that is not allowed."""
    if text and (own.is_done or rng.random() < 0.15):
        count = rng.randint(1, min(len(text), 40))
        own.rollback(count)
        other.rollback(count)
        del text[-count:]
        return
    allowed = allowed_tokens(row)
    token = int(rng.choice(allowed)) if rng.random() < 0.9 else rng.randrange(len(vocabulary.pieces))
    taken = own.accept(token)
    assert taken == other.accept(token)
    if taken:
        text.append(vocabulary.pieces[token])


LIMITED = {"type": "string", "maxLength": 5}


@pytest.mark.parametrize(
    ("beside", "quick"),
    [
        ({}, True),
        ({"type": "string"}, True),
        ({"anyOf": [LIMITED, {"type": "string", "minLength": 7}]}, True),
        ({"enum": ["ab", "abc"]}, True),
        ({"anyOf": [LIMITED, {"enum": ["longer than five"]}]}, False),
        ({"oneOf": [LIMITED, {"const": 5}]}, False),
        ({"type": "string", "pattern": "^[a-z]{3}$"}, True),
        ({"type": "string", "pattern": "^.{3}$"}, False),
        ({"type": "string", "pattern": "^[^a]+$"}, False),
        ({"type": "string", "pattern": "^\\ue000{3}$"}, False),
        ({"type": "object", "patternProperties": {"^\\S{3}$": True}}, False),
        ({"type": "string", "format": "date"}, True),
        ({"type": "string", "format": "unknown"}, False),
        ({"const": "\ue000"}, False),
        ({"type": "object", "properties": {"\ue000": True}}, False),
    ],
)
def test_which_schemas_have_short_strings(beside: dict[str, Any], quick: bool) -> None:
    for schema in ({"type": "array", "prefixItems": [LIMITED, beside]}, {"properties": {"a": beside, "b": LIMITED}}):
        constraint = constraint_of({"guided_json": json.dumps(schema)})
        assert constraint is not None
        assert grammar_of(constraint).has_short_strings == quick


@pytest.mark.parametrize(
    ("schema", "gets_one"),
    [
        ({"type": "string", "pattern": "[a-z]cole"}, True),
        ({"pattern": "^a.*b$", "minLength": 4, "description": "…"}, True),
        ({"type": ["null", "string"], "pattern": "a"}, True),
        ({"type": "string", "format": "uri"}, True),
        ({"type": "string", "pattern": "^[a-z]*$"}, False),
        ({"type": "string", "pattern": "a", "maxLength": 9}, False),
        ({"type": "string", "pattern": "a", "format": "email"}, False),
        ({"type": "string", "pattern": "a", "format": "uri"}, False),
        ({"type": "integer", "pattern": "a"}, False),
        ({"allOf": [{"type": "string", "pattern": "a"}]}, False),
    ],
)
def test_which_strings_get_an_alternative(schema: dict[str, Any], gets_one: bool) -> None:
    for given in (
        schema,
        {"type": "object", "properties": {"a": schema}},
        {"$defs": {"repeated_text_0": schema}} | schema,
    ):
        constraint = constraint_of({"guided_json": json.dumps(given)})
        assert constraint is not None
        assert (grammar_of(constraint).simpler is not None) == gets_one


def test_what_is_too_much_with_alternatives_is_compiled_without(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = LlguidanceBackend(vocabulary())
    monkeypatch.setattr(schema_strings, "_URI", "^(?=x)$")
    assert follow(backend, {"type": "string", "format": "uri"}, random.Random(), 20) == 0


def test_rows_are_the_librarys_where_the_second_matcher_is_of_no_use() -> None:
    """Because it gave up, as one that follows another schema does; or because bytes are missing for it."""
    whole, row, expected = vocabulary(), np.zeros(vocabulary().words, np.int32), np.zeros(vocabulary().words, np.int32)
    no_a = Vocabulary(tuple(b"" if piece == b"a" else piece for piece in whole.pieces), whole.end_ids)
    assert ShortStrings(whole).is_usable
    assert not ShortStrings(no_a).is_usable
    constraint, other = (constraint_of({"guided_json": schema}) for schema in (LIMITED, {"type": "integer"}))
    assert constraint is not None
    assert other is not None
    lost = Follower(library(whole, grammar_of(other)), ShortStrings(whole))
    made = (
        LlguidanceCompiled(library(whole, grammar_of(constraint)), whole, 0, lost),
        LlguidanceBackend(no_a).compile(constraint, float("inf")),
    )
    for ready, pieces in zip(made, (whole, no_a), strict=True):
        matcher, alone = ready.matcher(), reference(pieces, grammar_of(constraint))
        for byte in b'"b\\n b"':
            matcher.fill_mask(row)
            alone.fill_mask(expected)
            assert (row == expected).all()
            assert matcher.accept(10 + byte)
            assert alone.accept(10 + byte)


def test_rows_of_random_schemas_are_the_librarys() -> None:
    backend, seed = LlguidanceBackend(vocabulary()), random.randrange(2**32)
    rng, quick, followed = random.Random(seed), 0, 0
    for _ in range(60):
        found = follow(backend, with_parts(rng), rng, 40)
        followed += found >= 0
        quick += max(0, found)
    assert followed > 20, seed
    assert quick > 100, seed
