"""Requests of all kinds with constraints and without, what an engine makes of them, and whether that is what was asked.

Every constraint comes with a regular expression of its own, for the `regex` package, which knows partial matches: a
text that is cut must be the beginning of one that satisfies the constraint.
"""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jsonschema
import regex

from bladellm_runtime import LLM, SamplingParams
from bladellm_runtime.guided.constraint import constraint_of
from bladellm_runtime.request import FinishReason
from bladellm_runtime.text.stream import TextStream
from bladellm_runtime.wire.messages import AddRequest, RequestDelta, TokenLogprobs, one_by_one

S = r"(?: |\n(?: {0,64}|\t{0,16}))?"
STRING = r'"(?:[^"\\\x00-\x1f]|\\[nrbtf\\"/])*"'
SHORT = r'"(?:[^"\\\x00-\x1f]|\\[nrbtf\\"/]){0,6}"'
INTEGER = r"-?(?:0|[1-9]\d*)"
EMPLOYEE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer"},
        "skills": {"type": "array", "items": {"type": "string", "maxLength": 6}, "minItems": 2},
    },
    "required": ["name", "age", "skills"],
    "additionalProperties": False,
}
MIXED = {"type": "array", "items": {"enum": ["a", 1, None, True]}, "minItems": 2, "maxItems": 4}
IPV4 = r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"
WORDS = r"[a-f]{3,9}( [a-f]{1,4}){0,5}\."
CHOICES = ["yes", "no", "maybe, or maybe not", "日本語"]
GRAMMAR = 'start: "(" inner ")"\ninner: "x" | start'


@dataclass(frozen=True)
class Kind:
    """A constraint: its request fields, and a pattern of all texts that satisfy it, or of some more of a schema's."""

    fields: dict[str, Any]
    pattern: str


KINDS = {
    "employee": Kind(
        {"guided_json": EMPLOYEE},
        rf'\{{{S}"name"{S}:{S}{SHORT}{S},{S}"age"{S}:{S}{INTEGER}{S},{S}"skills"{S}:{S}'
        rf"\[{S}{SHORT}(?:{S},{S}{SHORT})+{S}\]{S}\}}",
    ),
    "mixed": Kind(
        {"response_format": {"type": "json_schema", "json_schema": {"name": "m", "schema": MIXED}}},
        rf'\[{S}(?:"a"|1|null|true)(?:{S},{S}(?:"a"|1|null|true)){{1,3}}{S}\]',
    ),
    "ipv4": Kind({"guided_regex": IPV4}, IPV4),
    "words": Kind({"guided_regex": WORDS}, WORDS),
    "date": Kind({"guided_regex": r"\d{4}-\d{2}-\d{2}"}, r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
    "choice": Kind({"guided_choice": CHOICES}, "|".join(map(regex.escape, CHOICES))),
    "grammar": Kind({"guided_grammar": GRAMMAR}, r"(?P<p>\((?:x|(?&p))\))"),
}
SCHEMAS = {"employee": EMPLOYEE, "mixed": MIXED}
SHORT_KINDS, SHORT_BYTES = ("choice", "date"), 25
"""Whose texts end before so many bytes, and so before as many tokens."""
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "logprobs": 2},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5},
    {"temperature": 0.0, "min_tokens": 40, "ignore_eos": True},
    {"temperature": 1.0, "min_tokens": 12, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {300: 5.0, 5: -50.0}, "top_p": 0.9},
)
GREEDY = [way for way in WAYS if way["temperature"] == 0]


@dataclass
class Answer:
    """What came of a request."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None
    error: str | None = None
    message: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request; kind: of `KINDS`, None without a constraint."""

    prompt: list[int]
    kind: str | None
    params: SamplingParams

    def request(self, number: int) -> AddRequest:
        constraint = None if self.kind is None else constraint_of(KINDS[self.kind].fields)
        return AddRequest(number, self.prompt, self.params, 0, time.monotonic(), "", constraint)


def random_asked(
    rng: random.Random,
    count: int,
    vocab: int,
    ways: Sequence[dict[str, Any]] = WAYS,
    tokens: Sequence[int] = (3, 25, 60),
) -> list[Asked]:
    """Requests with every kind of constraint in turn, and as many without; some begin alike."""
    kinds = [*KINDS, *[None] * len(KINDS)]
    shared = [rng.randrange(100, vocab) for _ in range(40)]
    found = []
    for index in range(count):
        own = [rng.randrange(100, vocab) for _ in range(rng.randrange(1, 25))]
        way = ways[rng.randrange(len(ways))]
        most = max(rng.choice(tokens), way.get("min_tokens", 0))
        params = SamplingParams(max_tokens=most, seed=rng.randrange(2**40), **way)
        found.append(Asked(shared[: rng.choice((0, 17, 40))] + own, kinds[index % len(kinds)], params))
    return found


def answers(llm: LLM, asked: Sequence[Asked], rng: random.Random | None = None) -> list[Answer]:
    """What the engine makes of them; they come one by one between steps where rng says so, or all at once."""
    core, found = llm._engine.core, [Answer() for _ in asked]
    requests = [one.request(number) for number, one in enumerate(asked)]
    streams = [TextStream(llm.tokenizer, request) for request in requests]
    while requests or not core.idle:
        deltas: list[RequestDelta] = []
        while requests and (rng is None or rng.random() < 0.6):
            deltas += core.add(requests.pop(0))
        if core.preparing:
            time.sleep(0.001)
        for delta in one_by_one(deltas + core.step()):
            take(found[delta.request_id], streams[delta.request_id], delta)
    core.check()
    return found


def take(answer: Answer, stream: TextStream, delta: RequestDelta) -> None:
    assert answer.finish is None, "a request must end exactly once"
    text = stream.feed(delta)
    answer.text += text.text
    answer.tokens += text.tokens
    answer.logprobs += text.logprobs or []
    answer.finish, answer.error, answer.message = text.finish, text.error, delta.message


def check(asked: Asked, answer: Answer) -> None:
    """Whether an answer is one to what was asked."""
    where = f"{asked} {answer}"
    assert answer.error is None, where
    assert (answer.finish is FinishReason.LENGTH) <= (len(answer.tokens) == asked.params.max_tokens), where
    if asked.params.logprobs is not None:
        assert [entry.token_ids[0] for entry in answer.logprobs] == answer.tokens, where
    if asked.kind is None:
        return
    pattern = KINDS[asked.kind].pattern
    if asked.kind in SHORT_KINDS and asked.params.max_tokens >= SHORT_BYTES:
        assert answer.finish is FinishReason.STOP, where
    if answer.finish is FinishReason.STOP:
        assert regex.fullmatch(pattern, answer.text), where
        if asked.kind in SCHEMAS:
            jsonschema.validate(json.loads(answer.text), SCHEMAS[asked.kind])
    else:
        # What is left of a character whose other bytes were cut off.
        assert answer.finish is FinishReason.LENGTH, where
        assert regex.fullmatch(pattern, answer.text.rstrip("\ufffd"), partial=True), where


def unconstrained(asked: Sequence[Asked]) -> list[Asked]:
    return [one for one in asked if one.kind is None]


def with_params(asked: Asked, **params: Any) -> Asked:
    return replace(asked, params=replace(asked.params, **params))
