"""Constraints made to do harm: refused soon or followed at little cost, the others not held up."""

import contextlib
import gc
import random
import threading
import time

import numpy as np
import pytest

from bladellm_runtime.guided.backend import Backend, MatcherError
from bladellm_runtime.guided.compiler import Compiler
from bladellm_runtime.guided.constraint import ConstraintError, constraint_of
from bladellm_runtime.guided.fsm.backend import FsmBackend
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
    {"guided_regex": "(.{0,30}a){30}"}, {"guided_regex": r"(\w{1,300}){9}"},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(480)}}},
    {"guided_json": {"type": "string", "minLength": 99_999}}, {"guided_json": {"type": "array", "maxItems": 2**63}},
    {"guided_grammar": 'start: (a|b)* c\na: /[ab]*a[ab]{13}/\nb: /(a+)+/\nc: /.*c.{200}/'},
    {"guided_regex": "(.{1,2000}){1,5}"}, {"guided_regex": "(.*[a-m].{9}|.*[g-z].{7}|.*[a-e].{13})+"},
    {"guided_grammar": 'start: x*\nx: "a" | "b" x | x x | /[a-z ]+/ | y\ny: x y | "(" x ")" | /./'},
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
    """Compiled within the deadline, then every step is short or ends the request. In processor time of the thread."""
    began, rng, slowest = time.thread_time(), random.Random(3), 0.0
    matcher, row = compiled(llguidance, **fields).matcher(), np.zeros(llguidance.vocabulary.words, np.int32)
    assert time.thread_time() - began < 4
    for _ in range(60):
        began = time.thread_time()
        try:
            matcher.fill_mask(row)
        except MatcherError:
            break
        token = int(rng.choice(allowed_tokens(row)))
        assert matcher.accept(token)
        slowest = max(slowest, time.thread_time() - began)
        if matcher.is_done:
            break
    assert slowest < 0.1


def merged(choices: int, parts: int) -> dict:
    """Choices merged with choices: `choices` to the power of `parts` alternatives, of `parts` properties each."""
    some = [[{"properties": {f"p{i}{j}": {}}} for j in range(choices)] for i in range(parts)]
    return {"allOf": [{"anyOf": each} for each in some]}


MANY = [{"type": "object", "properties": {f"p{i}{j}": {"type": "null"} for j in range(99)}} for i in range(10)]
LARGE_ROWS = (
    {"guided_json": merged(3, 6)}, {"guided_json": {"properties": {"a": merged(3, 6)}}},
    {"guided_json": {"allOf": [{"properties": {"a": {"items": part}}} for part in merged(3, 6)["allOf"]]}},
    {"guided_json": {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": merged(30, 2)}}},
    {"guided_json": {"items": {"allOf": [{"$ref": "#/$defs/a"}] * 3}, "$defs": {"a": merged(30, 1)["allOf"][0]}}},
    {"guided_json": {"items": {"anyOf": MANY}}},
    {"guided_json": {"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"anyOf": [*MANY[1:], {"$ref": "#/$defs/b"}]},
                                                               "b": {"oneOf": MANY[:1]}}}},
    {"guided_grammar": 'start: "{" x\nx: ' + "|".join("ab"[i % 2] for i in range(16_000)) + '\na: "a"\nb: "b"'},
    {"guided_grammar": 'start: "{" x\nx: ' + "|".join(f'"{i:x}" y' for i in range(4000)) + '\ny: "a"'},
)  # fmt: skip
"""Of which the parser has thousands of items before it at once, some of them only behind some text."""
EXPLODING = (
    *LARGE_ROWS,
    {"guided_regex": r"\W" * 8000}, {"guided_regex": r"[\Wa]" * 3000}, {"guided_regex": "(a|b)?" * 2700},
    {"guided_grammar": 'start: "a"\n' + "<" * 65_000}, {"guided_grammar": 'start: "a"\nb: "' + '\\"' * 32_000},
    {"guided_json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}},
    {"guided_json": {"items": {"type": "object", "properties": {f"p{i}": {} for i in range(700)}}}},
    {"guided_json": {"properties": {f"p{i}": {"type": "string", "pattern": r"\W\D\S"} for i in range(1000)}}},
    {"guided_json": {"$ref": "#/$defs/a0",
                     "$defs": {f"a{i}": {"$ref": f"#/$defs/a{(i * 617 + 1) % 1000}"} for i in range(1000)}}},
    {"guided_json": {"type": "array", "minItems": 2**63}}, {"guided_json": {"$ref": "https://localhost/schema.json"}},
    {"guided_json": {"allOf": [{"type": "integer"}, {"type": "string"}]}}, {"guided_json": {"enum": []}},
    {"guided_json": {"type": "string", "minLength": 2, "maxLength": 1}},
    {"guided_json": {"type": "array", "items": {"type": "null"}, "minItems": 2, "maxItems": 1}},
    {"guided_json": {"type": "array", "items": {"not": {"type": "string"}}}},
)  # fmt: skip


@pytest.mark.parametrize("fields", EXPLODING, ids=lambda fields: str(fields)[:40])
def test_what_explodes_or_has_no_answer_is_refused_soon(compiler: Compiler, fields: dict) -> None:
    began = time.process_time()
    assert refusal(compiler, **fields)
    assert time.process_time() - began < 4


def longest_wait(backend: Backend, fields: dict) -> float:
    """The longest time that this thread could not run while another compiled, in seconds."""
    constraint = constraint_of(fields)
    assert constraint is not None

    def work() -> None:
        with contextlib.suppress(ConstraintError):
            backend.compile(constraint, float("inf"))

    thread, longest = threading.Thread(target=work), 0.0
    last = time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.0003)
        last, before = time.monotonic(), last
        longest = max(longest, last - before)
    thread.join()
    return longest


@pytest.mark.turns
@pytest.mark.parametrize(
    "fields",
    [*EXPLODING[len(LARGE_ROWS):][:5], EXPLODING[len(LARGE_ROWS):][8], *LARGE_ROWS,
     {"guided_choice": [f"{i:04}{'x' * 51}" for i in range(1024)]},
     {"guided_choice": [f"{i}{'x' * 50}" for i in range(1000)]},
     {"guided_json": {"type": "object", "required": [f"p{i}" for i in range(1500)],
                      "properties": {f"p{i}": {"type": "string"} for i in range(1500)}}}],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_other_threads_go_on_while_constraints_compile(
    llguidance: LlguidanceBackend, fsm: FsmBackend, fields: dict
) -> None:
    """A wait of 10 ms and less; the bound leaves room for a busy machine, and the best of some attempts counts."""
    gc.disable()  # the engine's collector is frozen at its start; here it would look at all of the tests' objects
    try:
        for backend in (llguidance, fsm):
            assert any(longest_wait(backend, fields) < 0.05 for _ in range(10))
    finally:
        gc.enable()


def test_a_busy_compilation_pauses(fsm: FsmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some pauses in every part: a hundred milliseconds of work hold at least ten."""
    pauses: list[float] = []
    monkeypatch.setattr("bladellm_runtime.guided.pauses.time.sleep", pauses.append)
    for source in ("(a|b)?" * 2700, "w{3}|" * 2000 + "b", "[ab]*a[ab]{13}"):
        pauses.clear()
        began = time.thread_time()
        for _ in range(20):
            with contextlib.suppress(ConstraintError):
                compiled(fsm, guided_regex=source)
            if time.thread_time() - began > 0.1:
                break
        assert len(pauses) >= 10


def test_a_matcher_that_is_too_expensive_ends_alone(llguidance: LlguidanceBackend) -> None:
    """Too many lexer states in mid-answer: an error of this row, the rest of the batch is filled."""
    hostile = compiled(llguidance, guided_regex="(?:(?:(?:a?){99}){99}){99}").matcher()
    harmless = compiled(llguidance, guided_regex="a*").matcher()
    masks = np.zeros((2, llguidance.vocabulary.words), np.int32)
    for _ in range(200):
        errors = llguidance.fill_masks([harmless, hostile], masks, [0, 1])
        assert errors[0] is None
        assert masks[0].any()
        if errors[1] is not None:
            break
        token = max(allowed_tokens(masks[1]), key=lambda allowed: len(llguidance.vocabulary.pieces[allowed]))
        assert hostile.accept(int(token))
    assert isinstance(errors[1], MatcherError)
