"""Sequences of a batch that show the same physical granules at their beginning, which can be read once for all."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Rows of a batch, at least two, whose first `granules` granules are the same."""

    rows: tuple[int, ...]
    granules: int


def prefix_groups(granules: Sequence[Sequence[int]], members: int, least: int = 1) -> list[PrefixGroup]:
    """The disjoint groups, each of all rows that begin alike, that save most reads of granules where `members` rows
    share one read; rows may stay alone.

    granules: of each row the numbers of those that are full and end below its newest token. least: granules that a
    group must save. Sorted rows that begin alike are neighbours, so groups are runs of them.
    """
    order = sorted(range(len(granules)), key=lambda row: list(granules[row]))
    alike = [_common(granules[left], granules[right]) for left, right in pairwise(order)]
    return _best_groups(order, alike, members, least)[1]


def _best_groups(order: list[int], alike: list[int], members: int, least: int) -> tuple[int, list[PrefixGroup]]:
    """Granules saved in a run of sorted rows, and its groups: the whole run, or groups of the runs it falls into.

    alike: granules that each row but the last has in common with the next one.
    """
    if not alike:
        return 0, []
    depth = min(alike)
    borders = [0, *(index + 1 for index, common in enumerate(alike) if common == depth), len(order)]
    parts = [
        _best_groups(order[first:last], alike[first : last - 1], members, least) for first, last in pairwise(borders)
    ]
    apart = sum(saved for saved, _ in parts)
    together = (len(order) - -(-len(order) // members)) * depth
    if together >= max(apart, least, 1):
        return together, [PrefixGroup(tuple(sorted(order)), depth)]
    return apart, [group for _, groups in parts for group in groups]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common beginning, by halves: slices compare fast."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
