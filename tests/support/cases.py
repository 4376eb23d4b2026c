"""Samples of cases: the default run takes these, `make test-all` takes all."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def some_of(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """All cases, those outside of the sample marked slow."""
    return [case if case in sample else pytest.param(case, marks=pytest.mark.slow) for case in cases]


def some_pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs; in the default run only a diagonal, in which each of both occurs."""
    first, second = list(first), list(second)
    kept = {(i % len(first), i % len(second)) for i in range(max(len(first), len(second)))}
    return [
        pytest.param(one, other, marks=() if (i, j) in kept else pytest.mark.slow)
        for (i, one), (j, other) in product(enumerate(first), enumerate(second))
    ]
