"""`FsmBackend`: BladeLLM's own picture of guided decoding, a map from automaton states to allowed tokens.

A state's mask row is made when a sequence first stands there, by walking the automaton over the trie of the
vocabulary, and kept in a least-recently-used cache bounded in bytes. For `guided_regex` and `guided_choice`.
"""

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence

from bladellm_runtime.guided.backend import Matcher, MatcherError
from bladellm_runtime.guided.constraint import ConstraintError
from bladellm_runtime.guided.fsm.automaton import DEAD, Automaton, AutomatonError, automaton
from bladellm_runtime.guided.fsm.trie import Trie
from bladellm_runtime.guided.llguidance_grammar import regex_of
from bladellm_runtime.guided.vocabulary import Masks, Row, Vocabulary
from bladellm_runtime.request import Constraint, ConstraintKind

DEFAULT_ROW_BYTES = 64 * 2**20
MAX_SECONDS = 0.5
"""Python code slows other threads while it compiles, for all that it breathes; so not for long."""


class FsmBackend:
    """`Backend` over one vocabulary. `row_bytes` bounds the cache of mask rows."""

    name = "fsm"
    copies = 1  # its masks are filled in Python, one after another whatever the copies

    def __init__(self, vocabulary: Vocabulary, row_bytes: int = DEFAULT_ROW_BYTES) -> None:
        self.vocabulary = vocabulary
        self.rows = RowCache(row_bytes)
        self._trie = Trie(vocabulary)
        self._numbers = itertools.count()

    def compile(self, constraint: Constraint, deadline: float) -> "FsmCompiled":
        """`Backend.compile`."""
        field = constraint.field
        if constraint.kind not in (ConstraintKind.REGEX, ConstraintKind.CHOICE):
            raise ConstraintError(f"{field} needs --guided_backend llguidance; fsm takes regex and choice", field)
        try:
            machine = automaton(regex_of(constraint), min(deadline, time.monotonic() + MAX_SECONDS))
        except AutomatonError as error:
            raise ConstraintError(f"{field} cannot be used: {error}", field) from None
        return FsmCompiled(self, machine, next(self._numbers))

    def fill_masks(self, matchers: Sequence[Matcher], masks: Masks, rows: Sequence[int]) -> list[MatcherError | None]:
        """`Backend.fill_masks`."""
        return [_failure(matcher, masks[row]) for matcher, row in zip(matchers, rows, strict=True)]

    def row(self, compiled: "FsmCompiled", state: int) -> Row:
        """[words] int32, read only: the tokens allowed in a state."""
        found = self.rows.get((compiled.number, state))
        if found is None:
            found = self._trie.allowed(compiled.machine, state)
            if compiled.machine.accepting[state]:
                found |= self.vocabulary.ends
            self.rows.put((compiled.number, state), found)
        return found


class FsmCompiled:
    """An automaton; `number` tells its rows from those of others."""

    def __init__(self, backend: FsmBackend, machine: Automaton, number: int) -> None:
        self.backend, self.machine, self.number = backend, machine, number
        self.byte_count = machine.byte_count

    def matcher(self) -> "FsmMatcher":
        """A matcher at the beginning of a text."""
        return FsmMatcher(self)


class FsmMatcher:
    """One sequence's states so far; DEAD on top once an end token was accepted."""

    def __init__(self, compiled: FsmCompiled) -> None:
        self._compiled, self._vocabulary = compiled, compiled.backend.vocabulary
        self._states = [0]

    def fill_mask(self, row: Row) -> None:
        """`Matcher.fill_mask`."""
        state = self._states[-1]
        row[:] = self._vocabulary.ends if state == DEAD else self._compiled.backend.row(self._compiled, state)
        if not row.any():
            raise MatcherError("no token can follow")

    def accept(self, token: int) -> bool:
        """`Matcher.accept`."""
        state = self._states[-1]
        if state != DEAD and token in self._vocabulary.end_ids and self.may_end:
            self._states.append(DEAD)
            return True
        piece = self._vocabulary.pieces[token] if 0 <= token < len(self._vocabulary.pieces) else b""
        table = self._compiled.machine.table
        for byte in piece:
            if state == DEAD:
                return False
            state = int(table[state, byte])
        if not piece or state == DEAD:
            return False
        self._states.append(state)
        return True

    @property
    def is_done(self) -> bool:
        """`Matcher.is_done`."""
        state = self._states[-1]
        return state == DEAD or (self.may_end and not bool((self._compiled.machine.table[state] != DEAD).any()))

    @property
    def may_end(self) -> bool:
        """`Matcher.may_end`."""
        return self._states[-1] == DEAD or bool(self._compiled.machine.accepting[self._states[-1]])

    def rollback(self, count: int) -> None:
        """`Matcher.rollback`."""
        if not 0 <= count < len(self._states):
            raise ValueError(f"cannot undo {count} of {len(self._states) - 1} tokens")
        del self._states[len(self._states) - count :]


class RowCache:
    """Mask rows by (automaton, state), the least recently used dropped above `max_bytes`. Safe between threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.byte_count = max_bytes, 0
        self._rows: OrderedDict[tuple[int, int], Row] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[int, int]) -> Row | None:
        with self._lock:
            if key in self._rows:
                self._rows.move_to_end(key)
            return self._rows.get(key)

    def put(self, key: tuple[int, int], row: Row) -> None:
        with self._lock:
            if key not in self._rows:
                self.byte_count += row.nbytes
            self._rows[key] = row
            while self.byte_count > self.max_bytes:
                self.byte_count -= self._rows.popitem(last=False)[1].nbytes


def _failure(matcher: Matcher, row: Row) -> MatcherError | None:
    try:
        matcher.fill_mask(row)
    except MatcherError as error:
        return error
    return None
