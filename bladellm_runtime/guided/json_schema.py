"""Makes a JSON schema safe to compile: what llguidance would read more loosely is rewritten narrower, or refused.

Every text of the prepared schema satisfies the schema as given:

- patterns mean what `regex_syntax.search` says, so that `.` takes no newline and `\\D` no digit;
- formats whose grammar admits impossible values (29 February, leap seconds, long host names) become exact patterns;
- a whole number that a bound excludes stays out also where the other bound is less than 1 away, which llguidance 1.9
  forgets;
- `minProperties` is refused where repeated keys could make up the number;
- sizes are bounded, also of what may come next at one place, references stay inside the schema, recursion must have an
  end, and values and names hold no control characters.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from bladellm_runtime.guided import regex_syntax, schema_rows, schema_strings
from bladellm_runtime.guided.pauses import breathe

MAX_COUNT = 100_000
MAX_REFERENCES = 1000
MAX_OPTIONAL = 480
"""Optional properties of one object: with more, a row takes too long and the matcher gives up."""
_SINGLE = ("additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains",
           "propertyNames", "unevaluatedItems", "unevaluatedProperties")  # fmt: skip
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,30}"
EXACT_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": f"{_LABEL}(?:\\.{_LABEL}){{0,3}}",
}
"""Formats written as patterns: the calendar's days, no leap seconds, no host name above 253 characters."""

Schema = dict[str, Any]


class SchemaError(ValueError):
    """A schema that cannot be used; one clause that names the keyword."""


@dataclass(frozen=True)
class Prepared:
    """A schema to compile. may_multiply: its choices may become more alternatives than there are in its text;
    lengths_alone_matter, repeated_texts: see `schema_strings`."""

    schema: Schema
    may_multiply: bool
    lengths_alone_matter: bool
    repeated_texts: list[tuple[Schema, str]]


def prepared(schema: Schema) -> Prepared:
    """The schema to compile; `schema` itself is changed. Raises `SchemaError`."""
    nodes = _visited(schema)
    references = {node["$ref"]: _target(schema, node["$ref"]) for node in nodes if "$ref" in node}
    if len(references) > MAX_REFERENCES:
        raise SchemaError(f"it has more than {MAX_REFERENCES} different $ref")
    if not _ends(schema, references):
        raise SchemaError("it is unsatisfiable: its recursion ($ref) has no end")
    multiplies = schema_rows.may_multiply(nodes)
    lengths_alone_matter, repeated = schema_strings.lengths_alone_matter(nodes), schema_strings.repeated_texts(nodes)
    _exclude_bounds(nodes)
    for node in nodes:
        breathe()
        _check_keywords(node, node is schema)
        _check_literals(node)
        _check_counts(node)
        _rewrite_strings(node)
    if schema_rows.has_large_row(nodes, references):
        raise SchemaError("anyOf, oneOf and allOf bring too many properties together at one place")
    return Prepared(schema, multiplies, lengths_alone_matter, repeated)


def _visited(schema: Schema) -> list[Schema]:
    """Every subschema once, also those only a reference leads to."""
    found: dict[int, Schema] = {}
    left: list[Any] = [schema]
    while left:
        node = left.pop()
        if not isinstance(node, dict) or id(node) in found:
            continue
        breathe()
        found[id(node)] = node
        left += _subschemas(node)
        if "$ref" in node:
            left.append(_target(schema, node["$ref"]))
    return list(found.values())


def _subschemas(node: Schema) -> Iterator[Any]:
    for keyword in _SINGLE:
        yield node.get(keyword)
    for keyword in _LISTS:
        yield from node[keyword] if isinstance(node.get(keyword), list) else ()
    for keyword in _MAPS:
        yield from node[keyword].values() if isinstance(node.get(keyword), dict) else ()


def _target(schema: Schema, reference: object) -> Any:
    """What a JSON pointer into the schema leads to."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise SchemaError("a $ref leads out of the schema; references of the form #/... are supported")
    node: Any = schema
    for part in reference.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and key in node:
            node = node[key]
        elif isinstance(node, list) and key.isascii() and key.isdigit() and len(key) < 6 and int(key) < len(node):
            node = node[int(key)]
        else:
            raise SchemaError("a $ref leads to nothing" + ("; percent-encoding is not supported" * ("%" in key)))
    return node


def _ends(schema: Schema, references: dict[str, Any]) -> bool:
    """Whether some finite text can satisfy the schema, by what its references and required parts say."""
    known = dict.fromkeys(references, False)
    found, order = True, list(references.items())
    while found:
        found = False
        order = [(name, target) for name, target in reversed(order) if not known[name]]  # chains end soon either way
        for name, target in order:
            breathe()
            known[name] = _finite(target, known)
            found |= known[name]
    return _finite(schema, known)


def _finite(node: Any, known: dict[str, bool]) -> bool:
    if not isinstance(node, dict):
        return True
    if "$ref" in node and not known.get(node["$ref"], True):
        return False
    every, some = node.get("allOf"), node.get("anyOf") or node.get("oneOf")
    if isinstance(every, list) and not all(_finite(part, known) for part in every):
        return False
    if isinstance(some, list) and some and not any(_finite(part, known) for part in some):
        return False
    kinds, parts = node.get("type"), []
    if kinds in ("object", ["object"]):
        properties, names = node.get("properties"), node.get("required")
        properties = properties if isinstance(properties, dict) else {}
        parts = [properties.get(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    elif kinds in ("array", ["array"]) and isinstance(count := node.get("minItems"), int):
        first = node.get("prefixItems")
        first = first[:count] if isinstance(first, list) else []
        parts = first + [node.get("items")] * (count > len(first))
    return all(_finite(part, known) for part in parts)


def _check_keywords(node: Schema, is_root: bool) -> None:
    if "x-guidance" in node:
        raise SchemaError("x-guidance is not supported")
    if not is_root and ("$id" in node or ("id" in node and isinstance(node["id"], str))):
        raise SchemaError("$id below the top is not supported")


def _check_literals(node: Schema) -> None:
    """Control characters that only \\u could write, which the answer may not use."""
    literals = [node.get("const"), node.get("enum"), node.get("required"), node.get("properties")]
    while literals:
        part = literals.pop()
        if isinstance(part, dict):
            literals += [*part, *(part.values() if part is not node.get("properties") else ())]
        elif isinstance(part, list):
            literals += part
        elif isinstance(part, str) and any(char < " " and char not in "\b\t\n\f\r" for char in part):
            raise SchemaError("a value or name holds a control character")


def _check_counts(node: Schema) -> None:
    for name in _COUNTS:
        if name not in node:
            continue
        count = node[name]
        if isinstance(count, bool) or not isinstance(count, int | float) or count != int(count) or count < 0:
            raise SchemaError(f"{name} must be a whole number of 0 or more")
        if count > MAX_COUNT and name.startswith("min"):
            raise SchemaError(f"{name} is above the limit of {MAX_COUNT}")
        node[name] = min(int(count), MAX_COUNT)
    required = node.get("required")
    surely = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    properties = node.get("properties")
    if isinstance(properties, dict) and len(properties) - surely > MAX_OPTIONAL:
        raise SchemaError(f"an object has more than {MAX_OPTIONAL} properties that are not required")
    closed = node.get("additionalProperties") is False and not node.get("patternProperties")
    if node.get("minProperties", 0) > max(1, surely) and not closed:
        raise SchemaError("minProperties above the number of required properties needs additionalProperties: false")


def _exclude_bounds(nodes: list[Schema]) -> None:
    """Rewrite `exclusiveMinimum: n`, n whole, to `minimum: n + a little` where an upper bound is less than 1 above n.

    Bounds of different subschemas can meet (`allOf`), so any upper bound counts. The same for `exclusiveMaximum`.
    """
    for exclusive, inclusive, others, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        ends = [node[name] for node in nodes for name in others if _is_number(node.get(name))]
        for node in nodes:
            bound = node.get(exclusive)
            if not _is_number(bound) or bound != int(bound) or not any(0 < sign * (end - bound) < 1 for end in ends):
                continue
            if abs(bound) > 1e6:
                raise SchemaError(f"{exclusive} is less than 1 away from the other bound")
            del node[exclusive]
            given = node.get(inclusive, bound)
            nearest = round(bound + sign * 1e-6, 6)
            if _is_number(given):
                node[inclusive] = max(given, nearest) if sign > 0 else min(given, nearest)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf")


def _rewrite_strings(node: Schema) -> None:
    """Patterns and formats to their exact form."""
    exact = EXACT_FORMATS.get(node["format"]) if isinstance(node.get("format"), str) else None
    if isinstance(node.get("pattern"), str):
        node["pattern"] = _anchored(node["pattern"])
    if exact is not None:
        del node["format"]
        others = node.get("allOf")
        node["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": f"^(?:{exact})$"}]
    named = node.get("patternProperties")
    if isinstance(named, dict):
        node["patternProperties"] = {_anchored(pattern): inner for pattern, inner in named.items()}
        if len(node["patternProperties"]) < len(named):
            raise SchemaError("two patternProperties mean the same")


def _anchored(pattern: str) -> str:
    try:
        return f"^{regex_syntax.written(regex_syntax.search(pattern))}$"
    except regex_syntax.RegexError as error:
        raise SchemaError(f"a pattern cannot be used: {error}") from None
