"""Request fields -> constraint: at most one, bounded, and the same value for the same constraint."""

import json

import msgspec
import pytest

from bladellm_runtime.guided.constraint import ConstraintError, constraint_of
from bladellm_runtime.request import Constraint, ConstraintKind
from tests.guided.samples import PROFILE


def nested(depth: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


def test_a_schema_is_the_same_as_object_as_string_and_in_response_format() -> None:
    made = [
        constraint_of({"guided_json": PROFILE}),
        constraint_of({"guided_json": json.dumps(PROFILE, indent=3)}),
        constraint_of({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": PROFILE}}}),
    ]
    assert len({(constraint.kind, constraint.source) for constraint in made if constraint}) == 1
    assert json.loads(made[0].source) == PROFILE
    assert list(json.loads(made[0].source)["properties"]) == list(PROFILE["properties"])


def test_constraints_survive_the_wire() -> None:
    for fields in (
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "é", "a"]},
        {"response_format": {"type": "json_object"}},
    ):
        constraint = constraint_of(fields)
        assert constraint is not None
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(constraint), type=Constraint) == constraint
    assert constraint_of({"guided_choice": ["a", "é", "a"]}).source == '["a","é"]'
    assert constraint_of({"guided_grammar": 'start: "a"'}).kind is ConstraintKind.GRAMMAR


def test_no_constraint() -> None:
    assert constraint_of({}) is None
    assert constraint_of({"guided_json": None, "guided_regex": None, "response_format": {"type": "text"}}) is None
    assert constraint_of({"guided_regex": "a", "response_format": {"type": "text"}}) is not None


def test_what_goes_with_a_schema_in_response_format() -> None:
    holder = {"name": "a", "description": None, "strict": False, "schema": PROFILE}
    made = constraint_of({"response_format": {"type": "json_schema", "json_schema": holder}})
    assert made == constraint_of({"response_format": {"type": "json_schema", "json_schema": {"schema": PROFILE}}})
    assert constraint_of({"response_format": {"type": "json_object", "json_schema": None}}) is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": "{}", "guided_regex": "a"},
        {"guided_choice": ["a"], "response_format": {"type": "json_object"}},
        {"guided_json": "{"}, {"guided_json": ""}, {"guided_json": "true"}, {"guided_json": True},
        {"guided_json": "[1]"},
        {"guided_json": {"enum": ["x" * 2**16]}}, {"guided_json": '{"enum": ["' + "x" * 5_000_000 + '"]}'},
        {"guided_json": nested(65)}, {"guided_json": json.dumps(nested(65))}, {"guided_json": "[" * 60_000},
        {"guided_json": '{"type": "string", "type": "integer"}'}, {"guided_json": {"const": "\ud800"}},
        {"guided_json": {"maxItems": 2**64}}, {"guided_json": '{"minimum": NaN}'},
        {"guided_regex": ""}, {"guided_regex": 3}, {"guided_regex": "a\0b"}, {"guided_regex": "\udfff"},
        {"guided_regex": "a" * 20_000},
        {"guided_choice": []}, {"guided_choice": "a"}, {"guided_choice": [1]}, {"guided_choice": [""]},
        {"guided_choice": ["a"] * 1025}, {"guided_choice": ["a\0"]}, {"guided_choice": ["x" * 40_000, "y" * 40_000]},
        {"guided_grammar": 'root ::= "a"'}, {"guided_grammar": {}}, {"guided_grammar": "a" * 70_000},
        {"response_format": "json_object"}, {"response_format": {}}, {"response_format": {"type": ["text"]}},
        {"response_format": {"type": "json_schema"}}, {"response_format": {"type": "json_schema", "json_schema": {}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
        {"response_format": {"type": "json_object", "schema": {"type": "string"}}},
        {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "regex": "a"}}},
    ],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_what_cannot_be_a_constraint_is_refused_in_one_sentence(fields: dict) -> None:
    with pytest.raises(ConstraintError) as caught:
        constraint_of(fields)
    assert caught.value.param in fields
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_the_deepest_schema_that_is_taken() -> None:
    assert constraint_of({"guided_json": nested(63)}) is not None
