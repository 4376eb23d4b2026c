"""What simulations of rings of stages in shared memory have in common."""

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
