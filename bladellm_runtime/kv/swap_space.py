"""Places in host memory that hold copies of cached granules: which are free. Numbers only."""


class SwapSpace:
    """Places 0 to n - 1."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(reversed(range(num_places)))

    @property
    def used(self) -> int:
        return self.num_places - len(self._free)

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Raises `MemoryError` when fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"the swap space has {len(self._free)} free places, {count} are needed")
        return [self._free.pop() for _ in range(count)]

    def give(self, places: list[int]) -> None:
        self._free.extend(reversed(places))
