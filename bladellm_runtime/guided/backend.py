"""What a back end of guided decoding provides: constraint -> compiled constraint -> a matcher for each sequence."""

from collections.abc import Sequence
from typing import Protocol

from bladellm_runtime.guided.vocabulary import Masks, Row, Vocabulary
from bladellm_runtime.request import Constraint


class MatcherError(RuntimeError):
    """A matcher that cannot go on: no token is allowed, or a step is too expensive. Only its request ends."""


class Matcher(Protocol):
    """Follows one sequence. Not safe to use from two threads at once."""

    def fill_mask(self, row: Row) -> None:
        """Write the allowed next tokens into `row` ([vocabulary words] int32, contiguous).

        At least one bit is set: end tokens where the text may end, and nothing else once `is_done`. Raises
        `MatcherError`.
        """

    def accept(self, token: int) -> bool:
        """Go on by one token. False, and nothing changes, for a token that is not allowed. Raises `MatcherError`."""

    @property
    def is_done(self) -> bool:
        """True when no more text can follow: the whole is complete, only an end token is left or was accepted."""

    @property
    def may_end(self) -> bool:
        """True when the text so far satisfies the constraint."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens, end tokens too. Raises `ValueError` beyond the first."""


class Compiled(Protocol):
    """A constraint made ready, shared by its matchers; may be used from several threads."""

    @property
    def byte_count(self) -> int:
        """Bytes of memory that it holds, estimated."""

    def matcher(self) -> Matcher:
        """A matcher at the beginning of a text."""


class Backend(Protocol):
    """One way to follow constraints over one vocabulary; may be used from several threads."""

    name: str
    vocabulary: Vocabulary
    copies: int
    """Into how many copies of a compiled constraint its matchers are spread at most: 1 where that gains nothing."""

    def compile(self, constraint: Constraint, deadline: float) -> Compiled:
        """Make a constraint ready. Raises `ConstraintError`: not supported, unsatisfiable, or too large.

        Back ends written in Python stop at `deadline` (`time.monotonic()` seconds).
        """

    def fill_masks(self, matchers: Sequence[Matcher], masks: Masks, rows: Sequence[int]) -> list[MatcherError | None]:
        """`fill_mask` of matchers of this back end: `matchers[i]` into `masks[rows[i]]`; the error of each, if any."""
