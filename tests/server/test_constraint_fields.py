"""Constraints in requests: what the parsers hand to the engine, and what they refuse beside one."""

import json

import pytest

from bladellm_runtime.guided.constraint import constraint_of
from bladellm_runtime.request import Constraint, ConstraintKind
from tests.guided.samples import PROFILE
from tests.server.calls import BOTH, chat, completion, refusal

ASKED = {
    "guided_json": (PROFILE, ConstraintKind.JSON),
    "guided_regex": ("[ab]+", ConstraintKind.REGEX),
    "guided_choice": (["a", "b"], ConstraintKind.CHOICE),
    "guided_grammar": ('start: "a"', ConstraintKind.GRAMMAR),
    "response_format": ({"type": "json_object"}, ConstraintKind.JSON),
}


@BOTH
@pytest.mark.parametrize("name", ASKED)
def test_each_field_becomes_a_constraint(parse, name):
    value, kind = ASKED[name]
    call = parse(**{name: value}, **dict.fromkeys(set(ASKED) - {name}))
    assert (call.constraint.kind, call.constraint.field) == (kind, name)
    assert call.constraint == constraint_of({name: value})
    assert call.ignored_fields == ()


@BOTH
def test_a_schema_may_be_an_object_a_string_or_openais(parse):
    holder = {"type": "json_schema", "json_schema": {"name": "profile", "strict": True, "schema": PROFILE}}
    calls = [parse(guided_json=PROFILE), parse(guided_json=json.dumps(PROFILE)), parse(response_format=holder)]
    assert {call.constraint.source for call in calls} == {constraint_of({"guided_json": PROFILE}).source}
    assert json.loads(calls[0].constraint.source) == PROFILE


@BOTH
def test_no_constraint(parse):
    assert parse().constraint is None
    assert parse(response_format={"type": "text"}, stop="x").constraint is None
    assert parse(**dict.fromkeys(ASKED), stop_token_ids=[5]).constraint is None


@BOTH
def test_two_constraints_are_refused(parse):
    names = list(ASKED)
    for first, second in zip(names, [*names[1:], names[0]], strict=True):
        fields = {name: ASKED[name][0] for name in (first, second)}
        wanted = max(first, second, key=names.index)
        error = refusal(parse, wanted, **fields)
        assert error.code == "constraint_refused"
        assert first in error.message
        assert second in error.message


@BOTH
@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    ("stop", "param"),
    [
        ({"stop": "}"}, "stop"),
        ({"stop": [], "stop_tokens": [3]}, "stop_tokens"),
        ({"stop": None, "stop_token_ids": [3]}, "stop_token_ids"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
    ],
)
def test_a_stop_beside_a_constraint_is_refused(parse, name, stop, param):
    error = refusal(parse, param, **{name: ASKED[name][0]}, **stop)
    assert error.code == "constraint_refused"
    assert name in error.message


@BOTH
def test_what_goes_with_a_constraint(parse):
    beside = {
        "n": 3, "seed": 5, "ignore_eos": True, "min_tokens": 2, "max_tokens": 9, "presence_penalty": 1.5,
        "repetition_penalty": 1.2, "logit_bias": {"5": -100}, "stop": [], "stop_token_ids": [], "stream": True,
        "skip_special_tokens": False, "include_stop_str_in_output": False,
    }  # fmt: skip
    more = {"echo": True, "logprobs": 2} if parse is completion else {"logprobs": True, "top_logprobs": 2}
    call = parse(guided_regex="[ab]+", **beside, **more)
    assert call.constraint == Constraint(ConstraintKind.REGEX, "[ab]+", "guided_regex")
    assert (call.params.n, call.params.seed, call.params.logprobs) == (3, 5, 2)


def test_the_continuation_of_a_message_may_be_constrained():
    call = chat(guided_regex="a", resume_response="{")
    assert (call.resume_response, call.constraint.source) == ("{", "a")
