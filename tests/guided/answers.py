"""Whether an answer keeps to its constraint, by `jsonschema`, `json` and `re`; a cut one by writing it to its end."""

import json
import re
from functools import cache

import jsonschema
import numpy as np

from bladellm_runtime.guided.backend import Compiled
from bladellm_runtime.guided.constraint import constraint_of
from bladellm_runtime.guided.llguidance_backend import LlguidanceBackend
from bladellm_runtime.request import Constraint, ConstraintKind
from tests.guided.samples import small_vocabulary

FIRST_BYTE = 10
"""The token of byte 0 in the small vocabulary."""
ENDING, ENDING_IN_STRING = b'}]".:0,', b'".0'
"""Bytes that bring a text to its end, the earlier ones sooner."""


def check_answer(fields: dict, text: str, finish: str) -> None:
    """`fields` are the request's. A text that was cut must be the beginning of one that satisfies them."""
    if finish == "stop":
        check_satisfies(fields, text)
    else:
        assert finish == "length"
        check_satisfies(fields, text + ending_of(fields, text))


def check_satisfies(fields: dict, text: str) -> None:
    [(name, value)] = fields.items()
    if name == "guided_regex":
        assert re.fullmatch(value, text), text
    elif name == "guided_choice":
        assert text in value
    else:
        jsonschema.validate(json.loads(text), schema_of(name, value), format_checker=jsonschema.FormatChecker())


def schema_of(name: str, value: object) -> dict:
    if name == "guided_json":
        return json.loads(value) if isinstance(value, str) else value
    return value["json_schema"]["schema"] if value["type"] == "json_schema" else {"type": "object"}


def ending_of(fields: dict, text: str) -> str:
    """A short text that may follow; fails where the constraint does not allow `text` itself."""
    matcher, ending = _compiled(constraint_of(fields)).matcher(), b""
    is_json = constraint_of(fields).kind is ConstraintKind.JSON
    row = np.zeros(_backend().vocabulary.words, np.int32)
    for place, byte in enumerate(text.encode()):
        assert matcher.accept(FIRST_BYTE + byte), f"{text[: place + 1]!r} is no beginning"
    while not matcher.may_end:
        matcher.fill_mask(row)
        byte = _next_byte([byte for byte in range(32, 127) if _has(row, FIRST_BYTE + byte)], ending, json=is_json)
        assert matcher.accept(FIRST_BYTE + byte)
        ending += bytes([byte])
        assert len(ending) < 5000
    return ending.decode()


def _next_byte(allowed: list[int], ending: bytes, *, json: bool) -> int:
    """In a JSON text one that brings it nearer to its end, if there is one; else one that was seldom chosen before."""
    wanted = (ENDING_IN_STRING if ord("~") in allowed else ENDING) if json else b""
    others = sorted(allowed, key=lambda byte: (byte == ord(" "), ending.count(byte)))
    return next((byte for byte in wanted if byte in allowed), others[0])


def _has(row: np.ndarray, token: int) -> bool:
    return bool(row[token // 32] >> (token % 32) & 1)


@cache
def _backend() -> LlguidanceBackend:
    return LlguidanceBackend(small_vocabulary())


@cache
def _compiled(constraint: Constraint) -> Compiled:
    return _backend().compile(constraint, float("inf"))
