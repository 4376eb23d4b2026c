"""The longest beginning of a prompt that a tree of the prompt cache has."""

import itertools
from dataclasses import dataclass, field

from bladellm_runtime.kv.prompt_tree import TOKEN_BYTES, Node

COPY_TOKENS = 4
"""Fewer cached tokens than this are computed again: cheaper than launching copies in every layer."""
CANDIDATES, SEEN = 16, 256
"""Children compared token by token for a match in part, and those looked at to find them: the ones added last."""


@dataclass(slots=True)
class Match:
    """The longest beginning of some tokens that is cached.

    path: nodes from the root on whose units can be shown, holding the first `length` tokens; then `copied` more can be
    copied from the beginning of `source`, which is on the device.
    """

    path: list[Node] = field(default_factory=list)
    length: int = 0
    source: Node | None = None
    copied: int = 0

    @property
    def cached(self) -> int:
        return self.length + self.copied


@dataclass(frozen=True, slots=True)
class Finder:
    """Walks down a tree along `tokens`, as far as their byte `end`.

    granule_bytes: the tokens of a granule, unit_bytes: those of the largest unit. Parts of units are taken only from
    units born before plan `copyable`.
    """

    tokens: bytes
    end: int
    granule_bytes: int
    unit_bytes: int
    copyable: int

    def find(self, root: Node) -> Match:
        node: Node | None = root
        found, best = Match(), Match()
        position = 0
        while node is not None:
            child = self._child(node, position)
            if child is None or len(node.children) > 1:
                source, common = self._part(node, position)
                if position + common > best.cached * TOKEN_BYTES:
                    best = Match(found.path.copy(), found.length, source, common // TOKEN_BYTES)
            node = child
            if node is not None:
                found.path.append(node)
                position += len(node.tokens)
                found.length = position // TOKEN_BYTES
        return found if found.length >= best.cached else best

    def _child(self, node: Node, position: int) -> Node | None:
        """The child whose tokens all come next, the longest of them."""
        beginning = self.tokens[position : min(position + self.granule_bytes, self.end)]
        longest: Node | None = None
        for child in node.children.get(beginning, ()):
            length = len(child.tokens)
            if (
                not child.tail
                and position + length <= self.end
                and (longest is None or length > len(longest.tokens))
                and self.tokens.startswith(child.tokens, position)
            ):
                longest = child
        return longest

    def _part(self, node: Node, position: int) -> tuple[Node | None, int]:
        """The child that shares most of the next tokens, and how many bytes of them, whole tokens."""
        best, most = None, COPY_TOKENS * TOKEN_BYTES - 1
        wanted = self.tokens[position : min(self.end, position + self.unit_bytes)]
        for child in self._candidates(node, wanted):
            common = _common(child.tokens, wanted)
            if common > most:
                best, most = child, common
        return best, most if best is not None else 0

    def _candidates(self, node: Node, wanted: bytes) -> list[Node]:
        """Children to copy from, those added last: of the ones with the next granule's tokens, which share more than
        any other; where there are none, of the ones with the next token."""
        alike = node.children.get(wanted[: self.granule_bytes], ())
        found = itertools.islice(filter(self._may_copy, reversed(alike)), CANDIDATES)
        return list(found) or list(filter(self._may_copy, _latest(node, wanted[:TOKEN_BYTES])))

    def _may_copy(self, child: Node) -> bool:
        return child.unit is not None and child.born < self.copyable


def _latest(node: Node, first: bytes) -> list[Node]:
    """The children added last that begin with a token."""
    found: list[Node] = []
    for beginning in itertools.islice(reversed(node.children), SEEN):
        if beginning.startswith(first) and first:
            found += itertools.islice(reversed(node.children[beginning]), CANDIDATES - len(found))
            if len(found) == CANDIDATES:
                break
    return found


def _common(one: bytes, other: bytes) -> int:
    """Bytes of the whole tokens two sequences have in common at the beginning."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * TOKEN_BYTES : middle * TOKEN_BYTES] == other[low * TOKEN_BYTES : middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * TOKEN_BYTES
