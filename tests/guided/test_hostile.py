"""Constraints made to do harm: refused soon or followed at little cost, the others not held up."""

import random
import threading
import time

import numpy as np
import pytest

from bladellm_runtime.guided.backend import MatcherError
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.constraint import constraint_of
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.guided.vocabulary import allowed_tokens
from tests.guided.samples import compiled, refusal

HEAVY = (
    {"guided_regex": "[ab]*a[ab]{13}"}, {"guided_regex": "(a+)+b"}, {"guided_regex": "(.*a){40}"},
    {"guided_regex": "(?:(?:(?:a?){99}){99}){99}"}, {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    {"guided_regex": "|".join(f"w{i}x" for i in range(2000))}, {"guided_regex": r"[^a]{0,500}b[^c]{0,500}"},
    {"guided_choice": [f"{i}{'x' * 50}" for i in range(1000)]},
    {"guided_json": {"type": "string", "pattern": "[ab]*a[ab]{13}"}},
    {"guided_json": {"$defs": {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}, {"type": "array", "items":
        {"$ref": f"#/$defs/a{i + 1}"}}]} for i in range(25)} | {"a25": {"type": "string"}}, "$ref": "#/$defs/a0"}},
    {"guided_grammar": 'start: start start | "a"'}, {"guided_grammar": 'start: x+\nx: "a" x? "b" | x x x'},
)  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    ["(a", "a)", "[a", "a**", "*a", "a{3,1}", ".{1,100000}", "(?<=a)b", "(?=a)b", "(?!a)b", r"(a)\1", r"\bx", r"\p{L}",
     "(?i)a", r"\x00", r"[\0]", "[]", "[b-a]", r"\q", r"\u12", r"\ud800", "(" * 65 + "a" + ")" * 65, "a^b",
     "(^a)", "[^\\s\\S]", "a{,3}"],
)  # fmt: skip
def test_patterns_outside_the_syntax_are_refused(compiler: Compiler, pattern: str) -> None:
    assert refusal(compiler, guided_regex=pattern)


@pytest.mark.parametrize(
    "grammar",
    ["start: x", "start: @x", 'begin: "a"', "start: <[5]>", "start: <|im_start|>", 'start: %json {"uniqueItems": true}',
     'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}', "{", 'start: "a', "start: /(/"],
)  # fmt: skip
def test_grammars_that_cannot_be_held_are_refused(compiler: Compiler, grammar: str) -> None:
    assert refusal(compiler, guided_grammar=grammar)


def test_a_grammar_acts(llguidance: LlguidanceBackend) -> None:
    matcher = compiled(llguidance, guided_grammar='start: "a" x "b"\nx: /[0-9]+/ | "(" x ")"').matcher()
    assert all(matcher.accept(10 + byte) for byte in b"a((12))b")
    assert matcher.is_done


@pytest.mark.parametrize("fields", HEAVY, ids=lambda fields: str(fields)[:40])
def test_heavy_constraints_cost_little_a_step(llguidance: LlguidanceBackend, fields: dict) -> None:
    """Compiled within the deadline while another thread goes on, then every step is short or ends the request."""
    compiler, began = Compiler(llguidance), time.monotonic()
    constraint, rng, slowest = constraint_of(fields), random.Random(3), 0.0
    assert constraint is not None
    matcher, row = compiler.compile(constraint).matcher(), np.zeros(llguidance.vocabulary.words, np.int32)
    assert time.monotonic() - began < 5
    for _ in range(60):
        began = time.monotonic()
        try:
            matcher.fill_mask(row)
        except MatcherError:
            break
        token = int(rng.choice(allowed_tokens(row)))
        assert matcher.accept(token)
        slowest = max(slowest, time.monotonic() - began)
        if matcher.is_done:
            break
    assert slowest < 0.5
    compiler.close()


def test_other_threads_go_on_while_constraints_compile(llguidance: LlguidanceBackend) -> None:
    compiler, done = Compiler(llguidance, threads=1), threading.Event()
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1200)}}
    constraint = constraint_of({"guided_json": schema})
    assert constraint is not None
    compiler.submit(constraint).add_done_callback(lambda future: done.set())
    turns = 0
    while not done.wait(0.001):
        turns += 1
    assert turns >= 3
    compiler.close()
