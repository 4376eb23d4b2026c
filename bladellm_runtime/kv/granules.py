"""The pool of physical granules: which are free, handed out one at a time or as whole blocks. Numbers only."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice


@dataclass(slots=True, eq=False)
class Unit:
    """What the pool hands out: `count` consecutive granules from `first` on, one granule or a whole block."""

    first: int
    count: int

    @property
    def granules(self) -> list[int]:
        return list(range(self.first, self.first + self.count))


class GranulePool:
    """Free granules 0 to n - 1, in blocks of `block_granules` (granules beyond the last full block are never given
    out whole).

    Single granules come from blocks that are in use already, so that whole blocks stay whole; else from free blocks
    that were single granules before or lie at the beginning, where whole blocks are taken last.
    """

    def __init__(self, num_granules: int, block_granules: int = 1) -> None:
        self.num_granules = num_granules
        self.block_granules = block_granules
        self.free = num_granules
        blocks = -(-num_granules // block_granules)
        # Dicts as ordered sets: the free granules of each block; the blocks of which some, and all, are free.
        self._free = [dict.fromkeys(self._range(block)) for block in range(blocks)]
        self._whole = OrderedDict.fromkeys(reversed(range(num_granules // block_granules)))
        self._partial = dict.fromkeys(range(num_granules // block_granules, blocks))

    @property
    def free_blocks(self) -> int:
        """Whole blocks that are free."""
        return len(self._whole)

    def is_free(self, granule: int) -> bool:
        return granule in self._free[granule // self.block_granules]

    def take(self, wanted: int | None = None, after: int | None = None) -> Unit:
        """One granule: `wanted` if it is free, else the one that follows `after` if that costs no whole block, else
        any. Raises `MemoryError` when the pool is empty."""
        granule = self._choose(wanted, after)
        block = granule // self.block_granules
        self._whole.pop(block, None)
        free = self._free[block]
        del free[granule]
        if free:
            self._partial[block] = None
        else:
            self._partial.pop(block, None)
        self.free -= 1
        return Unit(granule, 1)

    def take_block(self, wanted: int | None = None) -> Unit | None:
        """A whole block, the one that starts with granule `wanted` if that is free; None when no block is."""
        block = -1 if wanted is None else wanted // self.block_granules
        if block in self._whole:
            del self._whole[block]
        elif self._whole:
            block, _ = self._whole.popitem(last=False)
        else:
            return None
        self._free[block].clear()
        self.free -= self.block_granules
        return Unit(block * self.block_granules, self.block_granules)

    def give(self, unit: Unit) -> None:
        """Take back what `take` or `take_block` gave."""
        block = unit.first // self.block_granules
        free = self._free[block]
        free.update(dict.fromkeys(unit.granules))
        self.free += unit.count
        if len(free) == self.block_granules:
            self._partial.pop(block, None)
            self._whole[block] = None
            self._whole.move_to_end(block, last=unit.count == 1)
        else:
            self._partial[block] = None

    def spare(self, granules: int) -> Iterator[int]:
        """So many free granules, or all: of blocks that are in use already first, and in each block those first that
        `take` comes to last."""
        whole = self._whole if self.block_granules == 1 else reversed(self._whole)
        free = (granule for block in chain(self._partial, whole) for granule in reversed(self._free[block]))
        return islice(free, granules)

    def check(self) -> None:
        """Raise `RuntimeError` if the books contradict each other. For tests."""
        full = [block for block, free in enumerate(self._free) if len(free) == self.block_granules]
        some = [block for block, free in enumerate(self._free) if 0 < len(free) < self.block_granules]
        if (
            self.free != sum(len(free) for free in self._free)
            or sorted(self._whole) != full
            or sorted(self._partial) != some
        ):
            raise RuntimeError("the granule pool's books contradict each other")

    def _choose(self, wanted: int | None, after: int | None) -> int:
        if self.free == 0:
            raise MemoryError("the KV cache has no free granule")
        if wanted is not None and self.is_free(wanted):
            return wanted
        follower = -1 if after is None else after + 1
        if 0 < follower < self.num_granules and self.is_free(follower):
            block = follower // self.block_granules
            if block in self._partial or not self._partial:
                return follower
        blocks = self._partial or self._whole
        granule: int = next(iter(self._free[next(reversed(blocks))]))
        return granule

    def _range(self, block: int) -> range:
        return range(block * self.block_granules, min((block + 1) * self.block_granules, self.num_granules))
