"""Samples of cases: the default run takes these, `make test-all` takes all."""

import os
import random
import uuid
from collections.abc import Collection, Iterable, Iterator
from itertools import product
from typing import Any

import pytest
from hypothesis import settings

RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID") or uuid.uuid4().hex
"""Of this run of the tests: all its processes must draw the same cases."""


def examples(whole: int) -> int:
    """So many random examples of a property with the slow tests, and the share without them that others try, too."""
    return whole * settings().max_examples // 100


def some_of(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """All cases, those outside of the sample marked slow."""
    return [case if case in sample else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def drawn_of(cases: Iterable[Any], count: int, always: Collection[Any] = ()) -> list[Any]:
    """All cases; in the default run only those of `always` and `count` others, which every run draws anew."""
    cases = list(cases)
    others = [index for index, case in enumerate(cases) if case not in always]
    drawn = random.Random(f"{RUN} {cases}").sample(others, count)
    return [
        case if index in drawn or index not in others else pytest.param(case, marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def resting(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests marked `turns` that this run leaves out: of each family half, other ones in every run. Without a name a
    family is the cases of one test."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("turns")
        if mark is not None and item.get_closest_marker("slow") is None:
            name = mark.args[0] if mark.args else item.nodeid.partition("[")[0]
            families.setdefault(name, []).append(item)
    for family in families.values():
        yield from sample_of(family, len(family) // 2)


def sample_of(cases: Collection[Any], count: int) -> list[Any]:
    """So many of the cases, others in every run: the same in all processes of one."""
    return random.Random(f"{RUN} {cases}").sample(list(cases), count)


def some_pairs(first: Iterable[Any], second: Iterable[Any], count: int | None = None) -> list[Any]:
    """All pairs; in the default run only a diagonal, in which each of both occurs. Every run draws another one.

    count: how many of the diagonal are enough, since each run draws others.
    """
    first, second = list(first), list(second)
    chance = random.Random(f"{RUN} {first} {second}")
    shift = chance.randrange(len(second))
    kept = [(i % len(first), (i + shift) % len(second)) for i in range(max(len(first), len(second)))]
    kept = kept if count is None else chance.sample(kept, count)
    return [
        pytest.param(one, other, marks=() if (i, j) in kept else pytest.mark.slow)
        for (i, one), (j, other) in product(enumerate(first), enumerate(second))
    ]
