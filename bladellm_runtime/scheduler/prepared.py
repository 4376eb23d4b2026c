"""`Prepared`: what a request was given before it could be scheduled."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

NO_ADAPTER = -1


class Progress(Enum):
    """What one more token means to a constraint."""

    GOES_ON = "goes on"
    """More text may follow."""
    COMPLETE = "complete"
    """It is the last token of the text: nothing but an end token could follow."""
    ENDED = "ended"
    """It is an end token, where the text may end."""
    FAILED = "failed"
    """The constraint cannot be followed any further; `TokenMatcher.failure` says why."""


class TokenMatcher(Protocol):
    """Follows the tokens of one request along its constraint."""

    failure: str
    """A sentence for the client once the constraint cannot be followed any further; empty before."""
    only_end_left: bool
    """Whether every token allowed next would end the answer; known where min_tokens holds those back."""

    def accept(self, token: int) -> Progress:
        """Go on by one token, of a text or an end token."""


@dataclass(slots=True)
class Prepared:
    """matcher: of its constraint, None without one. adapter: the slot of its LoRA adapter, or `NO_ADAPTER`."""

    matcher: TokenMatcher | None = None
    adapter: int = NO_ADAPTER
    weights: str = ""


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A row of a plan whose next token a matcher restricts. held: min_tokens holds its end tokens back, and `stops`,
    the stop tokens of its request."""

    row: int
    matcher: TokenMatcher
    held: bool
    stops: tuple[int, ...] = ()
