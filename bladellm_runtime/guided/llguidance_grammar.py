"""Constraints in the language of llguidance: its dialect of Lark, with how large the grammar may become."""

import json
import re
from dataclasses import dataclass, replace

import orjson

from bladellm_runtime.guided import json_schema, regex_syntax, schema_strings
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.schema_strings import PROBE
from bladellm_runtime.request import Constraint, ConstraintKind

MAX_WRITTEN_SCHEMA = 2**20
MAX_SYMBOLS = 250_000
MAX_SYMBOLS_IN_A_ROW = 7_500
"""Where any part of the grammar may come into one row: a row of 5,000 items, which takes 10 ms."""
MAX_ALTERNATIVES = 2_000
_SCHEMA_OPTIONS = {
    # What pretty printing needs, once between two parts: models that are at a loss write spaces without end.
    "whitespace_pattern": r"\x20|\n(?:\x20{0,64}|\t{0,16})",
    "lenient": False,
    "coerce_one_of": False,
    # No \u: a key written "\u0061" is the key "a" again, and would replace a value that was checked.
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
_LITERALS = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|/(?:\\.|[^/\\\n])++/?|#[^\n]*')
"""Each piece of the text is read once, closed or not: `re` lets no other thread run, so it must take linear time."""


@dataclass(frozen=True)
class Grammar:
    """Lark source. max_symbols: of the grammar that it becomes; has_short_strings: `ShortStrings` applies; simpler: the
    same language, with slower rows, for where this is too much."""

    text: str
    max_symbols: int = MAX_SYMBOLS
    has_short_strings: bool = False
    simpler: "Grammar | None" = None


def grammar_of(constraint: Constraint) -> Grammar:
    """What llguidance compiles. Raises `ConstraintError`."""
    if constraint.kind is ConstraintKind.JSON:
        return _schema_grammar(constraint)
    if constraint.kind is ConstraintKind.GRAMMAR:
        outside = _LITERALS.sub("", constraint.source)
        if re.search(r"<[^<>\n]*>", outside) or "x-guidance" in constraint.source:
            raise ConstraintError(
                f"{constraint.field} names tokens (<...>) or x-guidance, which are not supported", constraint.field
            )
        if outside.count("|") > MAX_ALTERNATIVES:
            raise ConstraintError(f"{constraint.field} has more than {MAX_ALTERNATIVES} alternatives", constraint.field)
        return Grammar(constraint.source, MAX_SYMBOLS_IN_A_ROW)
    try:
        return Grammar(f"start: /{regex_syntax.written(regex_of(constraint))}/")
    except regex_syntax.RegexError as error:
        raise ConstraintError(f"{constraint.field} cannot be used: {error}", constraint.field) from None


def _schema_grammar(constraint: Constraint) -> Grammar:
    try:
        prepared = json_schema.prepared(orjson.loads(constraint.source))
    except json_schema.SchemaError as error:
        raise ConstraintError(f"{constraint.field} cannot be used: {error}", constraint.field) from None
    text = _json_grammar(prepared.schema)
    if len(text) > MAX_WRITTEN_SCHEMA:
        raise ConstraintError(f"{constraint.field} has too large patterns", constraint.field)
    grammar = Grammar(text, MAX_SYMBOLS_IN_A_ROW if prepared.may_multiply else MAX_SYMBOLS,
                      has_short_strings=prepared.lengths_alone_matter and PROBE not in text)  # fmt: skip
    if not schema_strings.add_alternatives(prepared.schema, prepared.repeated_texts):
        return grammar
    return replace(grammar, text=_json_grammar(prepared.schema), simpler=grammar)


def _json_grammar(schema: json_schema.Schema) -> str:
    return f"start: %json {orjson.dumps(schema | {'x-guidance': _SCHEMA_OPTIONS}).decode()}"


def regex_of(constraint: Constraint) -> regex_syntax.Node:
    """The tree of a REGEX or CHOICE constraint. Raises `ConstraintError`."""
    if constraint.kind is ConstraintKind.CHOICE:
        return regex_syntax.Alternate(tuple(map(regex_syntax.literal, json.loads(constraint.source))))
    try:
        return regex_syntax.full_match(constraint.source)
    except regex_syntax.RegexError as error:
        raise ConstraintError(f"{constraint.field} cannot be used: {error}", constraint.field) from None
