"""`PromptLoad`: how much of a device's time prompts have been taking."""

from dataclasses import dataclass
from math import exp

AVERAGE_SECONDS = 2.0


@dataclass(slots=True)
class PromptLoad:
    """An exponential average over about `AVERAGE_SECONDS`, of times that never go back."""

    _share: float = 0.0
    _at: float = 0.0

    def add(self, milliseconds: float, now: float) -> None:
        """Count what the prompt tokens of a step add to it; now: seconds, when it is planned."""
        self._share = self.share(now) + milliseconds / (1e3 * AVERAGE_SECONDS)
        self._at = now

    def share(self, now: float) -> float:
        """Of the time until `now`, in seconds, what prompts took: 0 for none, 1 for all of it."""
        return self._share * exp((self._at - now) / AVERAGE_SECONDS)
