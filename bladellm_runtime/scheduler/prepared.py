"""`Prepared`: what a request was given before it could be scheduled."""

from dataclasses import dataclass
from typing import Protocol

NO_ADAPTER = -1


class TokenMatcher(Protocol):
    """Follows the tokens of one request along its constraint."""

    def accept(self, token: int) -> bool:
        """Go on by one token, of a text or an end token; False where it is not allowed, which no mask lets happen."""

    @property
    def is_done(self) -> bool:
        """True when no more text can follow: the request ends here."""


@dataclass(slots=True)
class Prepared:
    """matcher: of its constraint, None without one. adapter: the slot of its LoRA adapter, or `NO_ADAPTER`. weights:
    which weights compute its KV, empty for the base model's; others' are told apart by it."""

    matcher: TokenMatcher | None = None
    adapter: int = NO_ADAPTER
    weights: str = ""
