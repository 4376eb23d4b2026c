"""How much of a schema the parser has before it at once, estimated before it is compiled.

llguidance keeps a row of all that may come next and looks each new item up among the others, n² / 2 steps for n items,
2.5 ms for 2,000; it compares a row with its limit only when the row is there. So what makes large rows is refused.
"""

from collections.abc import Iterator
from typing import Any

from bladellm_runtime.guided.pauses import breathe

MAX_ITEMS = 4000
"""Estimated on the safe side: the parser's own limit is 2,000."""
_ITEMS_A_NODE, _ITEMS_A_PROPERTY = 8, 5
_CHOICES = ("anyOf", "oneOf")
_STRUCTURE = ("properties", "patternProperties", "additionalProperties", "items", "prefixItems")

Schema = dict[str, Any]


def has_large_row(nodes: list[Schema], targets: dict[str, Any]) -> bool:
    """Whether the alternatives at one place have too many properties in all. targets: what each `$ref` leads to."""
    if sum(map(_own_items, nodes)) <= MAX_ITEMS:
        return False
    return any(_row_items(node, targets) > MAX_ITEMS for node in nodes)


def _row_items(first: Schema, targets: dict[str, Any]) -> int:
    """Items of the row where `first` begins; counted no further than past the limit."""
    seen, left, items = {id(first)}, [first], 0
    while left and items <= MAX_ITEMS:
        breathe()
        node = left.pop()
        items += _own_items(node)
        for other in _beside(node, targets):
            if isinstance(other, dict) and id(other) not in seen:
                seen.add(id(other))
                left.append(other)
    return items


def _own_items(node: Schema) -> int:
    named, patterns, required = (node.get(name) for name in ("properties", "patternProperties", "required"))
    surely = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    optional = len(named.keys() - surely) if isinstance(named, dict) else 0
    return _ITEMS_A_NODE + _ITEMS_A_PROPERTY * (optional + (len(patterns) if isinstance(patterns, dict) else 0))


def _beside(node: Schema, targets: dict[str, Any]) -> Iterator[Any]:
    """What begins where the node does."""
    for keyword in ("allOf", *_CHOICES):
        yield from node[keyword] if isinstance(node.get(keyword), list) else ()
    yield targets.get(node["$ref"]) if isinstance(node.get("$ref"), str) else None


def may_multiply(nodes: list[Schema]) -> bool:
    """Whether choices may be merged with choices, be it twice the same: `allOf` of two `anyOf` of 10 are 100
    alternatives."""
    chooses = any(len(node[keyword]) > 1 for node in nodes for keyword in _CHOICES if _is_list(node, keyword))
    return chooses and any(map(is_merged, nodes))


def is_merged(node: Schema) -> bool:
    """Whether several schemas are merged into this one."""
    every = len(node["allOf"]) if _is_list(node, "allOf") else 0
    parts = every + sum(keyword in node for keyword in ("$ref", *_CHOICES)) + any(name in node for name in _STRUCTURE)
    return parts > 1


def _is_list(node: Schema, keyword: str) -> bool:
    return isinstance(node.get(keyword), list)
