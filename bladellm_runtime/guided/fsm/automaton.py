"""Tree of a regular expression -> nondeterministic automaton over UTF-8 bytes (Thompson) -> deterministic table."""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bladellm_runtime.guided.pauses import breathe
from bladellm_runtime.guided.regex_syntax import Alternate, Chars, Concat, Node, Repeat

MAX_NFA_STATES = 20_000
MAX_STATES = 5_000
DEAD = -1


class AutomatonError(ValueError):
    """An automaton that is too large or takes too long; one clause."""


@dataclass(frozen=True)
class Automaton:
    """A deterministic automaton. State 0 is the first; the end is reachable from every state.

    `table[state, byte]` int16 is the next state or DEAD; `accepting[state]` bool.
    """

    table: npt.NDArray[np.int16]
    accepting: npt.NDArray[np.bool_]

    @property
    def byte_count(self) -> int:
        """Bytes of memory held."""
        return self.table.nbytes + self.accepting.nbytes


class _Nfa:
    """States as lists: `steps[state]` holds (low byte, high byte, next state), `free[state]` next states for nothing.

    Each `add_*` puts the tree between the state `start` and a state that it returns.
    """

    def __init__(self, deadline: float) -> None:
        self.steps: list[list[tuple[int, int, int]]] = []
        self.free: list[list[int]] = []
        self.deadline = deadline

    def state(self) -> int:
        if len(self.steps) >= MAX_NFA_STATES:
            raise AutomatonError(f"it needs more than {MAX_NFA_STATES} positions; use smaller repetitions")
        self.steps.append([])
        self.free.append([])
        return len(self.steps) - 1

    def add(self, node: Node, start: int) -> int:
        match node:
            case Chars(ranges):
                return self.add_chars(ranges, start)
            case Concat(parts):
                for part in parts:
                    start = self.add(part, start)
                return start
            case Alternate(branches):
                end = self.state()
                for branch in branches:
                    begin = self.state()
                    self.free[start].append(begin)
                    self.free[self.add(branch, begin)].append(end)
                return end
            case Repeat():
                return self.add_repeat(node, start)

    def add_chars(self, ranges: tuple[tuple[int, int], ...], start: int) -> int:
        _check_time(self.deadline)
        end = self.state()
        for low, high in ranges:
            for sequence in utf8_ranges(low, high):
                at = start
                for first, last in sequence[:-1]:
                    at = self.go(at, first, last)
                self.steps[at].append((*sequence[-1], end))
        return end

    def go(self, at: int, first: int, last: int) -> int:
        """The state behind these bytes, shared with the sequence before where that began alike."""
        if self.steps[at] and self.steps[at][-1][:2] == (first, last) and self.steps[at][-1][2] == len(self.steps) - 1:
            return self.steps[at][-1][2]
        following = self.state()
        self.steps[at].append((first, last, following))
        return following

    def add_repeat(self, node: Repeat, start: int) -> int:
        for _ in range(node.low):
            start = self.add(node.inner, start)
        begin, end = self.state(), self.state()
        self.free[start] += [begin, end]
        if node.high is None:
            self.free[self.add(node.inner, begin)] += [begin, end]
            return end
        for _ in range(node.high - node.low):
            begin = self.add(node.inner, begin)
            self.free[begin].append(end)
        return end


def automaton(node: Node, deadline: float) -> Automaton:
    """The deterministic automaton of a tree. Raises `AutomatonError` past the limits or `deadline` (monotonic s)."""
    nfa = _Nfa(deadline)
    first = nfa.state()
    last = nfa.add(node, first)
    closures: dict[int, frozenset[int]] = {}
    begin = _closure(nfa, first, closures)
    numbers, rows, todo = {begin: 0}, [], [begin]
    for members in todo:  # which grows meanwhile
        _check_time(deadline)
        row = np.full(256, DEAD, np.int16)
        for low, high, targets in _split([step for member in members for step in nfa.steps[member]]):
            following = frozenset().union(*(_closure(nfa, target, closures) for target in targets))
            if following not in numbers:
                if len(todo) >= MAX_STATES:
                    raise AutomatonError(f"it needs more than {MAX_STATES} states")
                numbers[following] = len(todo)
                todo.append(following)
            row[low : high + 1] = numbers[following]
        rows.append(row)
    return Automaton(np.stack(rows), np.fromiter((last in members for members in todo), np.bool_, len(todo)))


def _closure(nfa: _Nfa, state: int, known: dict[int, frozenset[int]]) -> frozenset[int]:
    """The states with a step, and the last one, that are reached for nothing."""
    if state not in known:
        _check_time(nfa.deadline)
        seen, left = {state}, [state]
        while left:
            breathe()
            for following in nfa.free[left.pop()]:
                if following not in seen:
                    seen.add(following)
                    left.append(following)
        known[state] = frozenset(member for member in seen if nfa.steps[member] or not nfa.free[member])
    return known[state]


def _split(steps: list[tuple[int, int, int]]) -> Iterator[tuple[int, int, set[int]]]:
    """Disjoint byte ranges with the states that they lead to."""
    edges = sorted({low for low, _, _ in steps} | {high + 1 for _, high, _ in steps})
    targets: dict[int, set[int]] = {edge: set() for edge in edges}
    places = {edge: index for index, edge in enumerate(edges)}
    for low, high, target in set(steps):
        breathe()
        for edge in edges[places[low] : places[high + 1]]:
            targets[edge].add(target)
    for low, after in itertools.pairwise(edges):
        if targets[low]:
            yield low, after - 1, targets[low]


def utf8_ranges(low: int, high: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Sequences of byte ranges that together are the UTF-8 forms of the code points `low`..`high`."""
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from utf8_ranges(low, limit)
            yield from utf8_ranges(limit + 1, high)
            return
    for shift in (6, 12, 18):
        mask = (1 << shift) - 1
        if low >> shift == high >> shift or high < 0x80:
            continue
        if low & mask:
            yield from utf8_ranges(low, low | mask)
            yield from utf8_ranges((low | mask) + 1, high)
            return
        if high & mask != mask:
            yield from utf8_ranges(low, (high & ~mask) - 1)
            yield from utf8_ranges(high & ~mask, high)
            return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


def _check_time(deadline: float) -> None:
    breathe()
    if time.monotonic() > deadline:
        raise AutomatonError("it takes too long to compile")
