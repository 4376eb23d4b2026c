"""Attention heads over ranks: the cut whose largest rank costs least, whole KV groups where they cost no more."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """A KV head on a rank, and the query heads there that read it; numbers are the whole model's."""

    kv_head: int
    queries: range


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest rank that is allowed: `kv_heads` KV heads, `group` query heads of each. `size`: query heads of a KV
    head in the model; `heads`: all of them."""

    kv_heads: int
    group: int
    size: int
    heads: int

    def reach(self, start: int) -> int:
        """Where a rank that begins with query head `start` ends at the latest."""
        end_of_group = (start // self.size + 1) * self.size
        if end_of_group - start > self.group:
            return start + self.group
        if self.kv_heads == 1:
            return end_of_group
        whole = self.kv_heads - 1 if self.group >= self.size else 0
        return min(end_of_group + (whole * self.size or self.group), self.heads)

    def can_cover(self, start: int, ranks: int) -> bool:
        """Whether so many ranks, none of them empty, can hold the query heads from `start` on.

        The later a rank may begin, the later it may end, so it is enough to try the longest ones.
        """
        if self.heads - start < ranks:
            return False
        for _ in range(ranks):
            start = self.reach(start) if start < self.heads else start
        return start >= self.heads


def cut_heads(heads: int, kv_heads: int, degree: int, cost: Callable[[int, int], int]) -> list[tuple[HeadGroup, ...]]:
    """The heads of every rank. `cost` is that of a rank by its KV heads and its query heads of each."""
    size = heads // kv_heads
    every = (Bounds(most, group, size, heads) for most in range(1, kv_heads + 1) for group in range(1, size + 1))
    by_cost = sorted(every, key=lambda bounds: (cost(bounds.kv_heads, bounds.group), bounds.kv_heads))
    bounds = next(bounds for bounds in by_cost if bounds.can_cover(0, degree))
    ranks, start = [], 0
    for left in range(degree, 0, -1):
        end = _choose_end(bounds, start, left)
        ranks.append(_groups(range(start, end), size))
        start = end
    return ranks


def _choose_end(bounds: Bounds, start: int, ranks: int) -> int:
    """Where a rank ends that begins with `start`, when `ranks` with it are left: near its even share of the heads, and
    between two KV groups where there is such a place."""
    share = start - (start - bounds.heads) // ranks
    ends = [
        end
        for end in range(start + 1, bounds.reach(start) + 1)
        if (end == bounds.heads if ranks == 1 else bounds.can_cover(end, ranks - 1))
    ]
    borders = [end for end in ends if end % bounds.size == 0]
    return min(borders or ends, key=lambda end: (abs(end - share), -end))


def _groups(queries: range, size: int) -> tuple[HeadGroup, ...]:
    kv_heads = range(queries.start // size, (queries.stop - 1) // size + 1)
    return tuple(
        HeadGroup(kv, range(max(queries.start, kv * size), min(queries.stop, (kv + 1) * size))) for kv in kv_heads
    )
