"""`Constraint`: what a text must satisfy, as a value, and how request fields become one."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.request import Constraint, ConstraintKind

MAX_SOURCE_BYTES = 2**16
MAX_NESTING = 64
MAX_REGEX_CHARS = 2**14
MAX_CHOICES = 1024
FIELDS = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "response_format")
_ANY_OBJECT = '{"type":"object"}'


class ConstraintError(ParameterError):
    """A constraint that cannot be used; one sentence, `param` names the request field."""


def constraint_of(fields: Mapping[str, Any]) -> Constraint | None:
    """The constraint that the fields of a request ask for; None without one. Null is the same as absent.

    Checks form and size only; `guided/compiler.py` finds out whether it can be satisfied. Raises `ConstraintError`.
    """
    given = [name for name in FIELDS if fields.get(name) is not None]
    made = [found for name in given if (found := _PARSERS[name](fields[name], name)) is not None]
    if len(made) > 1:
        names = " and ".join(constraint.field for constraint in made)
        raise ConstraintError(f"{names} cannot be combined; a request takes one constraint", made[1].field)
    return made[0] if made else None


def _json(value: object, field: str) -> Constraint:
    if isinstance(value, str):
        value = _loaded(value, field)
    if not isinstance(value, dict):
        raise ConstraintError(f"{field} must be a JSON schema: an object, or a string that holds one", field)
    try:
        source = orjson.dumps(value)
    except (orjson.JSONEncodeError, RecursionError) as error:
        raise ConstraintError(f"{field} cannot be written as JSON: {str(error)[:100]}", field) from None
    _check_size(source, field)  # before its parts are looked at: there may be millions
    _check_nesting(value, field)
    return Constraint(ConstraintKind.JSON, source.decode(), field)


def _loaded(text: str, field: str) -> object:
    _check_size(_utf8(text, field), field)
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise ConstraintError(f"{field} is not valid JSON: {error.msg} at character {error.pos}", field) from None
    _check_nesting(value, field)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ConstraintError(f"{field} has an object with the same key twice", field)
        return found

    json.loads(text, object_pairs_hook=unique, parse_int=lambda digits: 0)  # which would drop half of the schema
    return value


def _regex(value: object, field: str) -> Constraint:
    text = _text(value, field)
    if len(text) > MAX_REGEX_CHARS:
        raise ConstraintError(f"{field} has {len(text)} characters, above the limit of {MAX_REGEX_CHARS}", field)
    return Constraint(ConstraintKind.REGEX, text, field)


def _choice(value: object, field: str) -> Constraint:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_CHOICES:
        raise ConstraintError(f"{field} must be an array of 1 to {MAX_CHOICES} strings", field)
    source = orjson.dumps(list(dict.fromkeys(_text(choice, field) for choice in value)))
    _check_size(source, field)
    return Constraint(ConstraintKind.CHOICE, source.decode(), field)


def _grammar(value: object, field: str) -> Constraint:
    text = _text(value, field)
    if "::=" in text:
        raise ConstraintError(f'{field} is written in GBNF; write it in Lark (rules such as start: "a" | "b")', field)
    return Constraint(ConstraintKind.GRAMMAR, text, field)


def _response_format(value: object, field: str) -> Constraint | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in ("text", "json_object", "json_schema"):
        raise ConstraintError(f"{field} must be an object whose type is text, json_object or json_schema", field)
    _check_keys(value, ("type", "json_schema") if kind == "json_schema" else ("type",), field)
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON, _ANY_OBJECT, field)
    holder = value.get("json_schema")
    if not isinstance(holder, dict) or not isinstance(holder.get("schema"), dict):
        raise ConstraintError(f"{field}.json_schema.schema must be a JSON schema, as an object", field)
    _check_keys(holder, ("schema", "name", "description", "strict"), f"{field}.json_schema")
    return _json(holder["schema"], field)


def _check_keys(value: dict[str, Any], known: tuple[str, ...], field: str) -> None:
    """A key that is not known may be a constraint, which must not be dropped."""
    unknown = next((name for name in value if name not in known and value[name] is not None), None)
    if unknown is not None:
        raise ConstraintError(f"{field} has the unknown key {unknown[:40]!r}; leave it out", field.split(".")[0])


_PARSERS = dict(zip(FIELDS, (_json, _regex, _choice, _grammar, _response_format), strict=True))


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConstraintError(f"{field} must be a string that is not empty", field)
    _check_size(_utf8(value, field), field)
    if "\0" in value:
        raise ConstraintError(f"{field} holds a NUL character; take it out", field)
    return value


def _utf8(text: str, field: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConstraintError(f"{field} has half of a surrogate pair at character {error.start}", field) from None


def _check_size(source: bytes, field: str) -> None:
    if len(source) > MAX_SOURCE_BYTES:
        raise ConstraintError(f"{field} has {len(source)} bytes, above the limit of {MAX_SOURCE_BYTES}", field)


def _check_nesting(value: object, field: str) -> None:
    level = [value]
    for _ in range(MAX_NESTING + 1):
        inside = [list(part.values()) if isinstance(part, dict) else part for part in level if isinstance(part, _HOLDS)]
        level = [inner for part in inside for inner in part]
        if not level:
            return
    raise ConstraintError(f"{field} is nested more than {MAX_NESTING} levels deep", field)


_HOLDS = (dict, list)
