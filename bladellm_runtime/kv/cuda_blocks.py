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

    What takes many calls of the driver is an iterator of short pieces (`Mapper`'s jobs).
    """

    def __init__(self, spec: KvSpec, mappings: CudaMappings, undo: ExitStack) -> None:
        """`undo` gives everything back."""
        self._length = spec.block_granules
        self._mappings = mappings
        self._sizes = [spec.granule_tokens * group.token_bytes for group in spec.groups]
        self.handles: list[dict[int, int]] = [{} for _ in self._sizes]
        """Of each group, by the first granule the handle holds."""
        self._pieces: list[list[ExitStack]] = [[] for _ in range(spec.num_granules // self._length)]
        """What undoes each block, handle by handle; empty for absent ones."""
        self._whole = [block >= spec.split_blocks for block in range(len(self._pieces))]
        self.homes = [mappings.reserve(undo, spec.num_granules * size) for size in self._sizes]
        for block, whole in enumerate(self._whole):
            undo.callback(_close, self._pieces[block])
            run_through(self._build(block, whole))

    def is_ready(self, block: int, whole: bool) -> bool:
        """Whether a block is there, and as asked for."""
        return bool(self._pieces[block]) and (self._whole[block] == whole or self._length == 1)

    def convert(self, block: int, whole: bool) -> Iterator[bool]:
        """Make a block whole, or split; nothing but its home may show it. It is absent after an error."""
        yield from self._drop(block)
        yield from self._build(block, whole)

    def _drop(self, block: int) -> Iterator[bool]:
        """Unmap a block's home and release its handles."""
        pieces = self._pieces[block]
        with ExitStack() as rest:
            rest.callback(_close, pieces)
            while pieces:
                pieces.pop().close()
                yield False

    def _build(self, block: int, whole: bool) -> Iterator[bool]:
        """Create an absent block's memory, zeroed, and map it at home."""
        first, step = block * self._length, self._length if whole else 1
        pieces = self._pieces[block]
        with ExitStack() as failed:
            failed.callback(_close, pieces)
            for group, size in enumerate(self._sizes):
                for granule in range(first, first + self._length, step):
                    pieces.append(self._piece(group, granule, step * size))
                    yield False
            at_home = zip(self._sizes, self.homes, strict=True)
            self._mappings.driver.zero([(home + first * size, self._length * size) for size, home in at_home])
            while not self._mappings.driver.zeroed():
                yield True
            failed.pop_all()
        self._whole[block] = whole

    def _piece(self, group: int, granule: int, size: int) -> ExitStack:
        """Create one handle and map it at home; returns what undoes that."""
        with ExitStack() as undo:
            handle = self._mappings.create(undo, size)
            self._mappings.map(undo, self.homes[group] + granule * self._sizes[group], size, handle)
            self.handles[group][granule] = handle
            return undo.pop_all()


def run_through(work: Iterator[bool]) -> None:
    """Carry out all of a work at once."""
    deque(work, maxlen=0)


def _close(pieces: list[ExitStack]) -> None:
    """Undo all pieces, the last first, whatever errors there are on the way."""
    with ExitStack() as undo:
        while pieces:
            undo.callback(pieces.pop(0).close)
