"""What slots show, block classes included: where a granule is in view already, nothing has to be mapped."""

from bladellm_runtime.kv.granules import Unit


class BlockClasses:
    """Whether each block of the pool is used whole or granule by granule.

    The two are different memory to an arena: a block that changes loses its contents, and every view of it ends. The
    *age* of a block counts its changes: blocks are whole at every even age. The first `split_blocks` begin split, at
    age 1. Where a block is a single granule nothing ever changes.
    """

    def __init__(self, num_granules: int, block_granules: int, split_blocks: int = 0) -> None:
        self._size = block_granules
        blocks = -(-num_granules // block_granules)
        self._ages = [1] * split_blocks + [0] * (blocks - split_blocks)

    def age(self, granule: int) -> int:
        return self._ages[granule // self._size]

    def is_whole(self, granule: int) -> bool:
        return self._size > 1 and self.age(granule) % 2 == 0

    def is_within(self, granule: int) -> bool:
        """Whether a granule is one of a whole block, but not its first."""
        return self.is_whole(granule) and granule % self._size > 0

    def use(self, unit: Unit) -> None:
        """Note that a unit is used as what it is, a whole block or a single granule."""
        if self._size > 1 and self.is_whole(unit.first) != (unit.count > 1):
            self._ages[unit.first // self._size] += 1


class SlotView:
    """The granule each position of one slot shows, and the age its block had then. Views last, whoever has the granule,
    until another takes the position; they are *stale* beyond what the slot's sequence holds."""

    __slots__ = ("_ages", "_classes", "granules")

    def __init__(self, classes: BlockClasses) -> None:
        self._classes = classes
        self._ages: list[int] = []
        self.granules: list[int] = []

    def at(self, position: int) -> int | None:
        """The granule in view at a position, None where there is none."""
        if position >= len(self.granules):
            return None
        granule = self.granules[position]
        return granule if self._ages[position] == self._classes.age(granule) else None

    def cuts(self, position: int) -> bool:
        """Whether a position may lie within a block in view that begins before it: nothing else can be shown from
        there on."""
        granule = self.at(position)
        return granule is not None and self._classes.is_within(granule)

    def show(self, position: int, unit: Unit) -> bool:
        """Show a unit from a position on; whether that changes anything."""
        age, end = self._classes.age(unit.first), position + unit.count
        if self.granules[position:end] == unit.granules and self._ages[position:end] == [age] * unit.count:
            return False
        self.granules[position:end] = unit.granules
        self._ages[position:end] = [age] * unit.count
        return True

    def cut(self, position: int) -> None:
        """Count on nothing from a position on."""
        del self.granules[position:], self._ages[position:]
