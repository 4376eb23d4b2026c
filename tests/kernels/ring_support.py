"""What simulations of rings of stages in shared memory have in common."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all have arrived and all expected bytes are there."""

    arrivals: int
    phase: int = 0
    pending: int = field(init=False)
    tiles: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def change(self, arrived: int, tiles: int = 0) -> None:
        self.pending, self.tiles = self.pending - arrived, self.tiles + tiles
        assert self.pending >= 0
        if self.pending == self.tiles == 0:
            self.phase, self.pending = self.phase + 1, self.arrivals

    def passed(self, parity: int) -> bool:
        """Whether a wait for the phase of this parity is over."""
        return self.phase & 1 != parity


def take_turns(
    parts: dict[str, Iterator[bool]],
    copies: Iterator[bool],
    most_idle: int,
    before_turn: Callable[[], None],
    choose: Callable[[list[str]], str] = random.choice,
) -> None:
    """Let parts go on, and copies, which never end, in random order until all parts have ended. Each says whether it
    went on. AssertionError after so many turns in which nobody did."""
    idle = 0
    while parts and idle < most_idle:
        name = choose(["copies", *parts])
        before_turn()
        try:
            went_on = next(copies if name == "copies" else parts[name])
        except StopIteration:
            del parts[name]
            went_on = True
        idle = 0 if went_on else idle + 1
    assert not parts, "nobody goes on"
