"""The pool of physical granules: numbers 0..n-1, counted references, handed out in runs where it can."""


class GranulePool:
    """Free granules, and how many slots show each of the others."""

    def __init__(self, num_granules: int) -> None:
        self._references = [0] * num_granules
        # A dict as an ordered set: the last one in comes out first, and membership tells whether a run goes on.
        self._free = dict.fromkeys(reversed(range(num_granules)))

    def __len__(self) -> int:
        """Granules that are free."""
        return len(self._free)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """`count` free granules, each following its predecessor where possible, the first one following `after`.

        Raises `MemoryError` and changes nothing when there are too few.
        """
        if count > len(self._free):
            raise MemoryError(f"the KV cache has {len(self._free)} free granules, {count} are needed")
        taken: list[int] = []
        last = -2 if after is None else after
        for _ in range(count):
            last += 1
            if last in self._free:
                del self._free[last]
            else:
                last, _ = self._free.popitem()
            self._references[last] = 1
            taken.append(last)
        return taken

    def share(self, granules: list[int]) -> None:
        """Count one more reference to each granule."""
        for granule in granules:
            self._references[granule] += 1

    def give(self, granules: list[int]) -> None:
        """Drop one reference to each; those without any are free again."""
        for granule in reversed(granules):
            self._references[granule] -= 1
            if self._references[granule] == 0:
                self._free[granule] = None


def runs(granules: list[int]) -> list[tuple[int, int, int]]:
    """Stretches of consecutive granules, as (position in the list, first granule, length)."""
    found: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(granules) + 1):
        if i == len(granules) or granules[i] != granules[i - 1] + 1:
            found.append((start, granules[start], i - start))
            start = i
    return found


def added_pieces(owned: list[int], granules: list[int]) -> int:
    """By how many runs appending `granules` to `owned` makes it longer: one less where the first continues the last."""
    continued = bool(owned and granules and granules[0] == owned[-1] + 1)
    return len(runs(granules)) - continued
