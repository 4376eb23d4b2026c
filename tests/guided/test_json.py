"""Schemas: what is written validates with `jsonschema`, whatever the tokens; what could be looser is refused."""

import json
import random

import jsonschema
import numpy as np
import pytest

from bladellm_runtime.guided.backend import MatcherError
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from tests.guided.samples import PROFILE, compiled, refusal, spelled, write

SCHEMAS = (
    PROFILE,
    {"type": "object"},
    {"type": "integer", "minimum": -7, "exclusiveMaximum": 1234},
    {"type": "number", "multipleOf": 0.5},
    {"enum": ["a", 1, None, {"b": [True]}, "é\n"]},
    {"type": ["string", "null"], "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "a.b"},
    {"type": "string", "pattern": r"^\D{2}\S$|^x"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "ipv4"},
    {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"const": 0}, "maxItems": 3, "minItems": 1},
    {"anyOf": [{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}, {"type": "boolean"}]},
    {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}},
                                                "required": [], "additionalProperties": False}}},
)  # fmt: skip


def written_texts(backend: LlguidanceBackend, schema: dict, seed: int, count: int, limit: int = 400) -> int:
    """How many random texts came to an end; each is checked."""
    ready, ended = compiled(backend, guided_json=schema), 0
    for turn in range(count):
        text = write(ready.matcher(), backend.vocabulary, random.Random(f"{seed} {turn}"), limit)
        if text is not None:
            jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
            ended += 1
    return ended


@pytest.mark.turns
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_written_texts_validate(llguidance: LlguidanceBackend, schema: dict) -> None:
    assert written_texts(llguidance, schema, 1, 8) > 0


def laid_out(value: object) -> list[str]:
    """The ways in which a value is usually written."""
    compact = json.dumps(value, separators=(",", ":"))
    return [compact, json.dumps(value), *(json.dumps(value, indent=indent) for indent in (0, 2, 4, "\t"))]


def test_white_space_is_what_layouts_need(llguidance: LlguidanceBackend) -> None:
    """Compact and pretty-printed texts are taken, to a depth of 16; blanks beyond those are not, wherever they are."""
    rng, deep = random.Random(), {"type": "integer"}
    person = {"name": "x", "age": 3, "skills": ["a", "b", "c"], "work history": [{"company": "a", "position": "b"}] * 2}
    nested: object = rng.randrange(100)
    for level in range(16):
        is_list = rng.random() < 0.5
        nested = [nested, *[7] * (level == 0)] if is_list else {"a": nested}
        deep = {"type": "array", "items": deep} if is_list else {"type": "object", "properties": {"a": deep}}
    blanks = (" " * 200, "  ", "\n\n", " \n", "\n" + " " * 65, "\t", "\r\n", "\n\t ", "\n" * 200)
    for schema, value in ((PROFILE, person), (deep, nested), ({"type": "object"}, {"a": [{"b": person}, 1, "x"]})):
        ready = compiled(llguidance, guided_json=json.loads(json.dumps(schema)))
        for text in laid_out(value):
            assert spelled(ready.matcher(), text.encode()), text
        text = laid_out(value)[0]
        places = [place for place, char in enumerate(text) if char in "{}[]:,"]
        for blank in blanks:
            for place in rng.sample(places, min(4, len(places))):
                assert not spelled(ready.matcher(), f"{text[:place]}{blank}{text[place:]}".encode())


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_many_written_texts_validate(llguidance: LlguidanceBackend, schema: dict) -> None:
    assert written_texts(llguidance, schema, 2, 300) > 5


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, r'{"a":1,"\u0061":"x"}'),
        ({"type": "object", "properties": {"a": {"type": "integer"}}}, '{"a":1,"a":"x"}'),
        ({"type": "object", "patternProperties": {"^a": {"type": "integer"}}}, r'{"\u0061b":"x"}'),
        ({"type": "string", "minLength": 2}, r'"\ud83d\ude00"'),
        ({"type": "string", "pattern": "^.$"}, r'"\n"'),
        ({"type": "string", "pattern": r"^\D$"}, '"٣"'),
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "string", "format": "date"}, '"1900-02-29"'),
        ({"type": "string", "format": "time"}, '"22:59:60Z"'),
        ({"type": "string", "format": "date", "pattern": "^2"}, '"1999-01-01"'),
        ({"type": "object"}, "{} x"),
        ({"type": "object"}, "[]"),
    ],
)
def test_invalid_texts_are_not_taken(llguidance: LlguidanceBackend, schema: dict, text: str) -> None:
    assert not spelled(compiled(llguidance, guided_json=schema).matcher(), text.encode())


def test_valid_texts_are_taken(llguidance: LlguidanceBackend) -> None:
    dates = compiled(llguidance, guided_json={"type": "string", "format": "date-time"})
    assert spelled(dates.matcher(), b'"2024-02-29T23:59:59.5+02:00"')
    person = {"name": 'A "b"', "age": -3, "skills": ["é", "", "c"], "work history": [{"company": "x", "position": ""}]}
    profile = compiled(llguidance, guided_json=PROFILE)
    assert spelled(profile.matcher(), json.dumps(person, ensure_ascii=False).encode())
    assert spelled(profile.matcher(), json.dumps(person, ensure_ascii=False, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"}, {"$ref": "http://localhost/x"}, {"$ref": "#/nowhere"}, {"$ref": 3},
        {"type": "string", "enum": [1]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1}, {"type": "integer", "minimum": 5, "maximum": 4},
        {"type": "array", "uniqueItems": True}, {"not": {}}, {"if": {"type": "string"}, "then": {"minLength": 3}},
        {"type": "array", "contains": {}}, {"dependentRequired": {"a": ["b"]}}, {"oneOf": [{}, {"type": "null"}]},
        {"type": "object", "minProperties": 2}, {"type": "string", "format": "unheard-of"}, {"type": "foo"},
        {"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, {"const": "a\u0000b"},
        {"properties": 3}, {"type": "string", "pattern": "(?=a)b"}, {"type": "string", "pattern": "a{1,5000}"},
        {"type": "string", "minLength": -1}, {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": "3"},
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(3)]} for i in range(12)]},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
    ids=lambda schema: json.dumps(schema)[:40],
)  # fmt: skip
def test_what_cannot_be_held_is_refused(compiler: Compiler, schema: dict) -> None:
    assert refusal(compiler, guided_json=schema)


def test_a_row_error_names_no_other_sequence(llguidance: LlguidanceBackend) -> None:
    """A batch with a matcher that is in error: the others get their rows."""
    ready = compiled(llguidance, guided_json=PROFILE)
    masks = np.zeros((5, llguidance.vocabulary.words), np.int32)
    matchers = [ready.matcher() for _ in range(4)]
    matchers[2].inner.try_consume_tokens([2**30 % 300])
    matchers[2].inner.rollback(9)
    errors = llguidance.fill_masks(matchers, masks, [4, 0, 1, 3])
    assert [error is None for error in errors] == [True, True, False, True]
    assert isinstance(errors[2], MatcherError)
    assert np.array_equal(masks[0], masks[4])
    assert masks[3].any()
    assert not masks[2].any()
