"""`ExtentMap`: where each slot's contiguous extent lies in one array of granules. Numbers only, no memory."""

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Move:
    """`count` granules whose contents go from `source` on to `target` on; the two may overlap."""

    source: int
    target: int
    count: int


@dataclass(slots=True)
class Extent:
    """`length` granules from `start` on, of which slot `slot` is the owner."""

    slot: int
    start: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


class ExtentMap:
    """Extents in order of address, with gaps between them for growth.

    `grow` succeeds whenever enough granules are free in total. It extends in place if it can, else moves the extent
    to the middle of the largest gap, else spreads the extents of a neighbourhood evenly. Either must leave gaps of
    at least half an even share of what is free, and the neighbourhood is the smallest that does, as in a packed
    memory array: moves stay rare and small until the array is nearly full.
    """

    def __init__(self, num_granules: int) -> None:
        self.num_granules = num_granules
        self.free = num_granules
        self._order: list[Extent] = []
        self._extents: dict[int, Extent] = {}

    def start(self, slot: int) -> int:
        """First granule of a slot; 0 if it has none."""
        return self._extents[slot].start if slot in self._extents else 0

    def length(self, slot: int) -> int:
        """Granules of a slot."""
        return self._extents[slot].length if slot in self._extents else 0

    def grow(self, slot: int, granules: int) -> list[Move]:
        """Make a slot's extent `granules` long. Returns the moves of contents this takes, in the order to execute.

        Raises `MemoryError` and changes nothing when fewer granules are free.
        """
        needed = granules - self.length(slot)
        if needed <= 0:
            return []
        if needed > self.free:
            raise MemoryError(f"the KV cache has {self.free} free granules, {needed} are needed")
        moves = self._make_room(slot, granules)
        self._extents[slot].length = granules
        self.free -= needed
        return moves

    def shrink(self, slot: int, granules: int) -> None:
        """Cut a slot's extent to its first `granules`."""
        removed = self.length(slot) - granules
        if removed <= 0:
            return
        extent = self._extents[slot]
        self.free += removed
        extent.length = granules
        if granules == 0:
            del self._order[self._index(extent)]
            del self._extents[slot]

    def check(self) -> None:
        """Raise `RuntimeError` if extents overlap, are out of order or are miscounted. For tests."""
        ends = [0] + [extent.end for extent in self._order]
        starts = [extent.start for extent in self._order] + [self.num_granules]
        ordered = all(end <= start for end, start in zip(ends, starts, strict=True))
        counted = self.free == self.num_granules - sum(extent.length for extent in self._order)
        listed = {extent.slot: extent for extent in self._order} == self._extents
        if not (ordered and counted and listed):
            raise RuntimeError(f"extent map: {self._order} with {self.free} of {self.num_granules} free")

    def _make_room(self, slot: int, granules: int) -> list[Move]:
        """Arrange that `granules` granules from the slot's start on are its own or free."""
        extent = self._extents.get(slot) or Extent(slot, 0, 0)
        index = self._index(extent)
        if extent.length and self._gap(index + 1)[1] - extent.start >= granules:
            return []
        if extent.length:
            del self._order[index]
        half_share = (self.free + extent.length - granules) // (2 * len(self._order) + 2)
        gap_index, start, end = self._largest_gap()
        if end - start >= granules + half_share:
            moves = _moves(extent, start + (end - start - granules) // 2)
            self._order.insert(gap_index, extent)
        else:
            index = index if extent.length else gap_index
            extent.start = extent.start if extent.length else start
            self._order.insert(index, extent)
            moves = self._spread(index, granules - extent.length, half_share)
        self._extents[slot] = extent
        return moves

    def _spread(self, index: int, needed: int, half_share: int) -> list[Move]:
        """Space the extents around `index` evenly, counting that one as `needed` longer.

        The number of extents doubles until each can have a gap of `half_share`, or all take part.
        """
        count = 1
        while True:
            low = max(0, index - count // 2)
            high = min(len(self._order), low + count)
            left, right = self._gap(low)[0], self._gap(high)[1]
            slack = right - left - needed - sum(extent.length for extent in self._order[low:high])
            if slack >= count * half_share or high - low == len(self._order):
                return self._lay_out(low, high, left, slack, index, needed)
            count *= 2

    def _lay_out(self, low: int, high: int, left: int, slack: int, grown: int, needed: int) -> list[Move]:
        """Give extents `low` to `high` equal gaps, one before each and one after the last; returns the safe order of
        moves: to lower addresses in ascending order, then to higher ones in descending order."""
        down: list[Move] = []
        up: list[Move] = []
        place = left
        for i in range(low, high):
            extent = self._order[i]
            target = place + slack * (i - low + 1) // (high - low + 1)
            (down if target < extent.start else up).extend(_moves(extent, target))
            place += extent.length + (needed if i == grown else 0)
        return down + up[::-1]

    def _gap(self, index: int) -> tuple[int, int]:
        """Start and end of the gap before extent `index`, or after the last one."""
        start = self._order[index - 1].end if index > 0 else 0
        end = self._order[index].start if index < len(self._order) else self.num_granules
        return start, end

    def _largest_gap(self) -> tuple[int, int, int]:
        """Index of the extent after the largest gap, and the gap's start and end."""
        gaps = ((i, *self._gap(i)) for i in range(len(self._order) + 1))
        return max(gaps, key=lambda gap: gap[2] - gap[1])

    def _index(self, extent: Extent) -> int:
        return bisect_left(self._order, extent.start, key=lambda other: other.start)


def _moves(extent: Extent, target: int) -> list[Move]:
    """Place an extent at `target`; the move of its contents, if there are any and they change place."""
    source, extent.start = extent.start, target
    return [Move(source, target, extent.length)] if extent.length and source != target else []
