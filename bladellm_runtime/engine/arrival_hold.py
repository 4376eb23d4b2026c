"""Whether the next step waits for a request that a front end is about to hand over."""

PATIENCE_SECONDS = 0.0025
"""How long a request may take from its announcement: tokenizing one of 1,024 tokens takes 1 to 2 ms."""
HOLD_SHARE = 0.02
"""Of the time, in which the device may have nothing to do for that."""
MOST_SECONDS = 0.01
"""Of that time that may be saved up."""


class ArrivalHold:
    """A step without prompts that is planned just before a prompt arrives makes it wait for the whole of that step.

    So a front end announces a request before it reads and tokenizes it, and the step waits for it: a little, and seldom
    enough for the requests that decode meanwhile.
    """

    def __init__(self) -> None:
        self._until = 0.0
        self._since: float | None = None
        self._saved, self._counted = MOST_SECONDS, 0.0

    def announce(self, now: float) -> None:
        """A request is to come."""
        self._until = now + PATIENCE_SECONDS

    def arrive(self) -> None:
        """One came."""
        self._until = 0.0

    def left(self, now: float, device_idle: bool) -> float:
        """Seconds that a step which is due by now may still wait, 0 or more. With an idle device that counts from the
        first such call on."""
        if now >= self._until:
            self.end(now)
            return 0.0
        if self._since is None:
            self._saved = min(self._saved + HOLD_SHARE * (now - self._counted), MOST_SECONDS)
            self._counted = now
            if device_idle:
                self._since = now
        since = now if self._since is None else self._since
        return max(min(self._until, since + self._saved) - now, 0.0)

    def end(self, now: float) -> None:
        """The step waits no more."""
        if self._since is not None:
            self._saved -= min(now - self._since, self._saved)
            self._since = None
