"""Sequences that show the same physical granules at their beginning, which can be read once for several of them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

ALIGNED = 128
"""Tokens: shared beginnings end where a block of any schedule of decode attention does."""


class PrefixGroup(NamedTuple):
    """Rows of a batch, at least two, whose first `granules` granules are the same."""

    rows: tuple[int, ...]
    granules: int

    def saved_tokens(self, members: int, granule_tokens: int) -> int:
        """Token reads that are saved where `members` rows share one read."""
        count = len(self.rows)
        return (count - -(-count // members)) * shared_tokens(self.granules, granule_tokens)


def shared_tokens(granules: int, granule_tokens: int) -> int:
    """Tokens of so many granules that are read as shared."""
    return granules * granule_tokens // ALIGNED * ALIGNED


@dataclass(slots=True, eq=False)
class _Branch:
    """A unit of consecutive granules behind those above it, `granules` down to its end, and who shows all of them."""

    first: int
    granules: int
    rows: dict[int, None] = field(default_factory=dict)
    children: "dict[int, _Branch]" = field(default_factory=dict)


class PrefixTree:
    """Beginnings of sequences as a tree: who enters or leaves costs what its own beginning is long, and the groups what
    shared beginnings are.

    `changes` counts who entered and left.
    """

    def __init__(self) -> None:
        self._root = _Branch(-1, 0)
        self._paths: dict[int, list[_Branch]] = {}
        self.changes = 0

    def enter(self, row: int, units: Iterable[tuple[int, int]]) -> None:
        """Add a row by its beginning: of each unit of full granules that end below its newest token, the number of the
        first and how many there are. Raises `ValueError` for a row that is there."""
        if row in self._paths:
            raise ValueError(f"row {row} is in the tree already")
        branch, path = self._root, [self._root]
        for first, count in units:
            child = branch.children.get(first)
            if child is None:
                child = branch.children[first] = _Branch(first, branch.granules + count)
            child.rows[row] = None
            path.append(child)
            branch = child
        self._paths[row] = path
        self.changes += 1

    def leave(self, row: int) -> None:
        """Take a row out."""
        path = self._paths.pop(row)
        for above, branch in pairwise(path):
            del branch.rows[row]
            if not branch.rows:
                del above.children[branch.first]
        self.changes += 1

    def groups(self, members: int, least: int = 1) -> list[PrefixGroup]:
        """The disjoint groups, each of all rows that begin alike, that save most reads of granules where `members` rows
        share one read; rows may stay alone. least: granules that a group must save."""
        found: list[PrefixGroup] = []
        for child in self._root.children.values():
            if len(child.rows) > 1:
                found += _best_groups(child, members, max(least, 1))[1]
        return found


def _best_groups(branch: _Branch, members: int, least: int) -> tuple[int, list[PrefixGroup]]:
    """Granules saved below the beginning of a branch of several rows, and its groups: all rows, as far as they go
    together, or groups of the branches that they fall into."""
    count = len(branch.rows)
    while len(branch.children) == 1:
        (child,) = branch.children.values()
        if len(child.rows) < count:
            break
        branch = child
    apart, groups = 0, []
    for child in branch.children.values():
        if len(child.rows) > 1:
            saved, found = _best_groups(child, members, least)
            apart += saved
            groups += found
    together = (count - -(-count // members)) * branch.granules
    if together >= max(apart, least):
        return together, [PrefixGroup(tuple(branch.rows), branch.granules)]
    return apart, groups
