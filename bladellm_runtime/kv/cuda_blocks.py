"""`CudaBlocks`: the physical memory of a KV cache by blocks, each whole or split, mapped at its home addresses."""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack

from bladellm_runtime.kv.cuda_mappings import CudaMappings
from bladellm_runtime.kv.spec import KvSpec


class CudaBlocks:
    """An address range a layer group, `homes`, where every granule is mapped at offset granule * size as long as it
    exists.

    A block is *whole*, one handle a group, or *split*, one handle a granule and group; or absent, for want of memory.
    A handle cannot be mapped in part, so converting a block unmaps its home, releases its handles and creates others,
    whose memory is zeroed.

    A block's memory is made handle by handle, and may be touched by one call a group: those calls are what most of it
    takes. What takes many calls is an iterator of short pieces (`Mapper`'s jobs).
    """

    def __init__(self, spec: KvSpec, mappings: CudaMappings, undo: ExitStack) -> None:
        """`undo` gives everything back."""
        self._length = spec.block_granules
        self._mappings = mappings
        self._sizes = [spec.granule_tokens * group.token_bytes for group in spec.groups]
        self.handles: list[dict[int, int]] = [{} for _ in self._sizes]
        """Of each group, by the first granule the handle holds. Each is mapped at home."""
        self._whole = [block >= spec.split_blocks for block in range(spec.num_granules // self._length)]
        """How each block is there, or was last."""
        self.homes = [mappings.reserve(undo, spec.num_granules * size) for size in self._sizes]
        for block, whole in enumerate(self._whole):
            undo.callback(self._close, block)
            run_through(self._build(block, whole))

    def is_ready(self, block: int, whole: bool) -> bool:
        """Whether a block is there, and as asked for."""
        there = block * self._length in self.handles[0]
        return there and (self._whole[block] == whole or self._length == 1)

    def convert(self, block: int, whole: bool) -> Iterator[bool]:
        """Make a block whole, or split; nothing but its home may show it. It is absent after an error."""
        yield from self._drop(block)
        yield from self._build(block, whole)

    def _drop(self, block: int) -> Iterator[bool]:
        """Unmap a block's home and release its handles."""
        with ExitStack() as rest:
            rest.callback(self._close, block)
            for group, granule in self._made(block):
                self._remove(group, granule)
                yield False

    def _build(self, block: int, whole: bool) -> Iterator[bool]:
        """Create an absent block's memory, zeroed, and map it at home."""
        first, driver = block * self._length, self._mappings.driver
        self._whole[block] = whole
        with ExitStack() as failed:
            failed.callback(self._close, block)
            homes = [(self._home(group, first), self._length * size) for group, size in enumerate(self._sizes)]
            for group, home in enumerate(homes):
                for granule in range(first, first + self._length, self._granules(block)):
                    self.handles[group][granule] = self._mappings.make(*self._extent(group, granule))
                    yield False
                driver.allow(*home)
            driver.zero(homes)
            while not driver.zeroed():
                yield True
            failed.pop_all()

    def _close(self, block: int) -> None:
        """Give back what there is of a block, whatever errors there are on the way."""
        with ExitStack() as rest:
            for group, granule in self._made(block):
                rest.callback(self._remove, group, granule)

    def _remove(self, group: int, granule: int) -> None:
        self._mappings.drop(*self._extent(group, granule), self.handles[group].pop(granule))

    def _made(self, block: int) -> list[tuple[int, int]]:
        """Groups and first granules of a block's handles."""
        granules = range(block * self._length, (block + 1) * self._length)
        return [(group, first) for group, handles in enumerate(self.handles) for first in granules if first in handles]

    def _extent(self, group: int, granule: int) -> tuple[int, int]:
        """Where a handle is at home, and its bytes."""
        return self._home(group, granule), self._granules(granule // self._length) * self._sizes[group]

    def _home(self, group: int, granule: int) -> int:
        return self.homes[group] + granule * self._sizes[group]

    def _granules(self, block: int) -> int:
        """Of a handle."""
        return self._length if self._whole[block] else 1


def run_through(work: Iterator[bool]) -> None:
    """Carry out all of a work at once."""
    deque(work, maxlen=0)
