"""Random schemas, and random instances near them: some valid, many invalid by one detail."""

import json
import random
from typing import Any

NAMES = ("a", "b", "ab", "c d", "é", "x-1", "")
TEXTS = (
    "",
    "a",
    "ab",
    "abc",
    "b",
    "é",
    "日本",
    "a b",
    "1",
    "2024-02-29",
    "2023-02-29",
    "a@b.c",
    "127.0.0.1",
    "\n",
    '"',
)
NUMBERS = (0, 1, -1, 2, 3, 5, 7, 10, -10, 100, 0.5, 1.5, -0.25, 2.5, 1e3, 12.75)
PATTERNS = ("a", "^a", "b$", "^[ab]+$", "^.{1,2}$", r"^\d+$", r"\s", "^$", "^(a|é)*$")
FORMATS = ("date", "time", "date-time", "ipv4", "email", "uuid", "hostname")
Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 3) -> Schema:
    """A schema of a few keywords, most of which fit together; nested `depth` deep at most."""
    makers = [_scalar, _string, _number, _values]
    if depth:
        makers += [_array, _object, _object, _combination]
    schema = rng.choice(makers)(rng, depth - 1)
    if depth == 3 and rng.random() < 0.3:
        schema = {"$defs": {"part": random_schema(rng, 1)}, "anyOf": [schema, {"$ref": "#/$defs/part"}]}
    return schema


def _scalar(rng: random.Random, _: int) -> Schema:
    kinds = ["null", "boolean", "integer", "string", "number"]
    return {"type": rng.choice([rng.choice(kinds), rng.sample(kinds, 2)])}


def _string(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": "string"}
    if rng.random() < 0.5:
        schema["minLength"] = rng.randint(0, 3)
    if rng.random() < 0.5:
        schema["maxLength"] = rng.randint(0, 4)
    if rng.random() < 0.4:
        schema["pattern"] = rng.choice(PATTERNS)
    if rng.random() < 0.2:
        schema["format"] = rng.choice(FORMATS)
    return schema


def _number(rng: random.Random, _: int) -> Schema:
    schema: Schema = {"type": rng.choice(("integer", "number"))}
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        if rng.random() < 0.3:
            schema[name] = rng.choice(NUMBERS)
    if rng.random() < 0.2:
        schema["multipleOf"] = rng.choice((1, 2, 3, 0.5, 0.25))
    return schema


def _values(rng: random.Random, _: int) -> Schema:
    chosen = [random_value(rng, 2) for _ in range(rng.randint(1, 4))]
    return {"const": chosen[0]} if rng.random() < 0.3 else {"enum": chosen}


def _array(rng: random.Random, depth: int) -> Schema:
    schema: Schema = {"type": "array"}
    if rng.random() < 0.8:
        schema["items"] = random_schema(rng, depth) if rng.random() < 0.9 else False
    if rng.random() < 0.3:
        schema["prefixItems"] = [random_schema(rng, depth) for _ in range(rng.randint(1, 2))]
    for name in ("minItems", "maxItems"):
        if rng.random() < 0.3:
            schema[name] = rng.randint(0, 3)
    if rng.random() < 0.05:
        schema[rng.choice(("uniqueItems", "contains"))] = True
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 4))
    schema: Schema = {"type": "object", "properties": {name: random_schema(rng, depth) for name in names}}
    if rng.random() < 0.6:
        schema["required"] = rng.sample(NAMES, rng.randint(0, 2)) if rng.random() < 0.1 else names[: rng.randint(0, 3)]
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice((False, False, random_schema(rng, depth)))
    if rng.random() < 0.15:
        schema["patternProperties"] = {rng.choice(PATTERNS): random_schema(rng, depth)}
    for name in ("minProperties", "maxProperties"):
        if rng.random() < 0.1:
            schema[name] = rng.randint(0, 3)
    if rng.random() < 0.05:
        schema |= rng.choice(({"propertyNames": {"maxLength": 1}}, {"dependentRequired": {"a": ["b"]}}))
    return schema


def _combination(rng: random.Random, depth: int) -> Schema:
    keyword = rng.choice(("anyOf", "anyOf", "allOf", "oneOf", "not", "if"))
    if keyword == "not":
        return {"not": random_schema(rng, depth)}
    if keyword == "if":
        return {"if": random_schema(rng, depth), "then": random_schema(rng, depth)}
    return {keyword: [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def random_value(rng: random.Random, depth: int = 3) -> Any:
    kind = rng.randrange(6 if depth else 4)
    if kind == 4:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    if kind == 5:
        return {name: random_value(rng, depth - 1) for name in rng.sample(NAMES, rng.randint(0, 3))}
    return rng.choice((rng.choice(TEXTS), rng.choice(NUMBERS), rng.choice((None, True, False)), rng.choice(TEXTS)))


def instance_near(rng: random.Random, schema: Any, depth: int = 4) -> Any:
    """A value that the schema may well allow; now and then a random one in its place."""
    if not isinstance(schema, dict) or not depth or rng.random() < 0.08:
        return random_value(rng, 1)
    for keyword in ("anyOf", "allOf", "oneOf"):
        if keyword in schema:
            return instance_near(rng, rng.choice(schema[keyword]), depth)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    kinds = schema.get("type", "string")
    kind = rng.choice(kinds) if isinstance(kinds, list) else kinds
    if kind == "object":
        declared = schema.get("properties", {})
        names = [name for name in declared if name in schema.get("required", ()) or rng.random() < 0.5]
        names += [rng.choice(NAMES)] * (rng.random() < 0.25)
        others = schema.get("additionalProperties")
        return {name: instance_near(rng, declared.get(name, others), depth - 1) for name in names}
    if kind == "array":
        first = schema.get("prefixItems", [])
        parts = [*first, *[schema.get("items")] * 3][: rng.randint(schema.get("minItems", 0), 4)]
        return [instance_near(rng, part, depth - 1) for part in parts]
    fitting = {"string": TEXTS, "integer": NUMBERS, "number": NUMBERS, "null": (None,), "boolean": (True, False)}
    return rng.choice(fitting.get(kind, TEXTS))


def spellings(instance: Any) -> tuple[str, str]:
    """The instance as JSON, with spaces and compact."""
    return json.dumps(instance, ensure_ascii=False), json.dumps(instance, ensure_ascii=False, separators=(",", ":"))
