"""Counts that the limits of a server need from all its front ends at once: in memory that they share."""

import mmap
from pathlib import Path

CELL_BYTES = 8


class SharedCount:
    """A number each front end has a part in: it changes its own, and reads the sum of all."""

    def __init__(self, cells: memoryview, front_end: int) -> None:
        self._cells = cells
        self._own = front_end

    def add(self, amount: int) -> None:
        """Change this front end's part."""
        self._cells[self._own] += amount

    def forget(self, front_end: int) -> None:
        """Take back the part of a front end that has died."""
        self._cells[front_end] = 0

    @property
    def total(self) -> int:
        """The sum over all front ends."""
        return sum(self._cells)

    @property
    def own(self) -> int:
        """This front end's part."""
        return self._cells[self._own]

    @property
    def excess(self) -> int:
        """How much larger this front end's part is than the smallest."""
        return self._cells[self._own] - min(self._cells)


class SharedCounts:
    """The counts of one server. Without a `path` they belong to this process alone."""

    def __init__(self, path: Path | None = None, front_end: int = 0, front_ends: int = 1) -> None:
        size = 2 * front_ends * CELL_BYTES
        if path is None:
            memory = mmap.mmap(-1, size)
        else:
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), size)
        cells = memoryview(memory).cast("q")
        self.open_requests = SharedCount(cells[:front_ends], front_end)
        self.connections = SharedCount(cells[front_ends:], front_end)

    @classmethod
    def create(cls, path: Path, front_ends: int) -> "SharedCounts":
        """Make the file for the first front end; the others then open it."""
        path.write_bytes(bytes(2 * front_ends * CELL_BYTES))
        return cls(path, 0, front_ends)

    def forget(self, front_end: int) -> None:
        """Take back what a front end that has died had open."""
        self.open_requests.forget(front_end)
        self.connections.forget(front_end)
