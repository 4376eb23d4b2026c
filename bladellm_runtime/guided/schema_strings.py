"""What a schema says of its strings that lets their mask rows be filled quickly; it allows the same texts as before.

llguidance allows all tokens of plain text at once only where a token of its grammar is a repetition of characters just
then. A pattern that may be found anywhere is none once a part of it has been seen: `[a-z]cole`, after "e", is any text
with `[a-z]cole` in it, or "cole" and any text. So such a string gets an alternative that stays a repetition: the same
text with U+10FFFF before what is looked for, where any character may be anyway.
"""

from collections.abc import Iterator
from typing import Any

from bladellm_runtime.guided import regex_syntax, schema_rows
from bladellm_runtime.guided.regex_syntax import Alternate, Chars, Concat, Node, RegexError, Repeat

PROBE = "\ue000"
"""A character for private use, which neither a format nor most patterns take."""
MAX_ALTERNATIVES = 32
MAX_ALTERNATIVE_CHARS = 4096
_ASCII_FORMATS = {"date", "time", "date-time", "hostname", "duration", "email", "ipv4", "ipv6", "uuid", "uri"}
_MARK = Chars(((0x10FFFF, 0x10FFFF),))
_NOT_PLAIN = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F), (0x85, 0x85), (0x2028, 0x2029))
URI_CHARS = r"a-zA-Z0-9\-._~!$&'()*+,;="
_URI = rf"^[a-zA-Z][a-zA-Z0-9+\-.]*://[{URI_CHARS}]*/[{URI_CHARS}:@/]*\?[{URI_CHARS}:@/?]*#[{URI_CHARS}:@/?]*$"
"""A part of the format: the library's own has a host that may also be an address or a user's name."""
_OF_A_STRING = ("type", "pattern", "format", "minLength")
_REMARKS = {"$schema", "$id", "$defs", "definitions", "$comment", "title", "description", "default", "examples"}

Schema = dict[str, Any]


def lengths_alone_matter(nodes: list[Schema]) -> bool:
    """Whether a place that takes `PROBE` so many times and no more takes any plain text of so many characters, no more.

    Such a place is inside a string with a `maxLength` where no pattern or format takes `PROBE`, and where no string of
    that kind begins beside one that a pattern, a format or a list of values describes. No value or name may have
    `PROBE` in it, which is not looked at here.
    """
    if not any("maxLength" in node for node in nodes):
        return False
    exact = [node for node in nodes if any(name in node for name in ("pattern", "format", "patternProperties"))]
    listed = any("enum" in node or "const" in node for node in nodes)
    chooses = any("anyOf" in node or "oneOf" in node for node in nodes)
    return not ((exact or listed) and chooses) and not any(map(_takes_probe, exact))


def _takes_probe(node: Schema) -> bool:
    if "format" in node and node["format"] not in _ASCII_FORMATS:
        return True
    named = node.get("patternProperties")
    patterns = [*(named if isinstance(named, dict) else ()), *([node["pattern"]] if "pattern" in node else ())]
    try:
        return any(_takes(regex_syntax.search(pattern)) for pattern in patterns)
    except (RegexError, TypeError):
        return True  # it is refused in any case


def _takes(node: Node) -> bool:
    match node:
        case Chars(ranges):
            return any(low <= ord(PROBE) <= high for low, high in ranges)
        case Repeat(inner):
            return _takes(inner)
        case Concat(parts) | Alternate(parts):
            return any(map(_takes, parts))


def repeated_texts(nodes: list[Schema]) -> list[tuple[Schema, str]]:
    """The strings that get an alternative, each with its pattern. `nodes` are as given, nothing in them rewritten.

    None where parts of the schema are merged: each alternative would be merged with each other.
    """
    if any(name in node for node in nodes for name in ("allOf", "oneOf")) or any(map(schema_rows.is_merged, nodes)):
        return []
    found = ((node, _repeated(node)) for node in nodes if _has_pattern_alone(node))
    return [(node, pattern) for node, pattern in found if pattern][:MAX_ALTERNATIVES]


def _has_pattern_alone(node: Schema) -> bool:
    """Whether a pattern or a format is all that it says of strings."""
    kinds = node.get("type", "string")
    return (
        (node.get("format") == "uri" if "format" in node else "pattern" in node)
        and not ("format" in node and ("pattern" in node or "minLength" in node))
        and node.keys() <= {*_OF_A_STRING, *_REMARKS}
        and (kinds == "string" or (isinstance(kinds, list) and "string" in kinds))
    )


def _repeated(node: Schema) -> str | None:
    if "format" in node:
        return _URI
    try:
        shortest, tree = int(node.get("minLength", 0)), regex_syntax.search(node["pattern"])
        marked = next(_marked(tree, shortest), None) if shortest <= regex_syntax.MAX_REPEAT else None
        text = "" if marked is None else f"^{regex_syntax.written(marked)}$"
    except (RegexError, TypeError, ValueError):
        return None  # it is refused in any case
    return text if len(text) <= MAX_ALTERNATIVE_CHARS else None


def _marked(tree: Node, shortest: int) -> Iterator[Node]:
    """The branches of the tree with a mark after the first repetition of any plain characters, at least `shortest`."""
    for branch in tree.branches if isinstance(tree, Alternate) else ():
        parts = list(_parts(branch))
        for place, part in enumerate(parts):
            if isinstance(part, Repeat) and part.high is None and _takes_plain(part.inner):
                longer = Repeat(part.inner, max(part.low, shortest), None)
                yield Concat((*parts[:place], longer, _MARK, *parts[place + 1 :]))
                break


def _parts(node: Node) -> Iterator[Node]:
    """One after another, however they are grouped."""
    for part in node.parts if isinstance(node, Concat) else ():
        yield from _parts(part) if isinstance(part, Concat) else (part,)


def _takes_plain(node: Node) -> bool:
    if not isinstance(node, Chars):
        return False
    return not regex_syntax.complement(regex_syntax.normalised([*node.ranges, *_NOT_PLAIN]))


def add_alternatives(schema: Schema, texts: list[tuple[Schema, str]]) -> bool:
    """Write `anyOf` into each of the strings; by reference, or the library makes one expression of both. False: none"""
    if not texts or not isinstance(schema.setdefault("$defs", {}), dict):
        return False
    for number, (node, pattern) in enumerate(texts):
        name = f"repeated_text_{number}"
        while name in schema["$defs"]:
            name += "_"
        schema["$defs"][name] = {"type": "string", "pattern": pattern}
        given = {keyword: node.pop(keyword) for keyword in _OF_A_STRING if keyword in node}
        node["anyOf"] = [given, {"$ref": f"#/$defs/{name}"}]
    return True
