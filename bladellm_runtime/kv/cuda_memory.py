"""`CudaMemory`: physical CUDA memory of a KV cache and its mappings. Knows granules and slots, but no tensors."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from bladellm_runtime.kv.arena import ArenaStats
from bladellm_runtime.kv.cuda_blocks import CudaBlocks
from bladellm_runtime.kv.cuda_driver import MemoryDriver
from bladellm_runtime.kv.cuda_mappings import CudaMappings
from bladellm_runtime.kv.cuda_views import View, ViewMap
from bladellm_runtime.kv.spec import KvSpec


class CudaMemory:
    """Two address ranges a layer group: `slots`, where slots show granules, and `homes`, where every granule is
    mapped as long as it exists (`CudaBlocks`).

    Before the slots, from `guards` on, lies a granule of memory of its own: launching a kernel checks that the first
    address of a tensor is mapped, which no slot's is for certain.

    Nothing but `close` waits for kernels. That is safe because the accounting takes a block otherwise, and shows other
    granules at a position, only after the last step that touched what was there.

    For one thread at a time. `show`, `clear`, `hide` and `convert` are iterators of short pieces (`Mapper`'s jobs),
    which may take turns as long as no two are about the same slot, and none is about a block that another one converts.
    `reclaim` is called when memory is short, before a second and last try.
    """

    def __init__(self, spec: KvSpec, driver: MemoryDriver, stats: ArenaStats, reclaim: Callable[[], None]) -> None:
        self._spec = spec
        self._driver = driver
        self._slot_granules = spec.max_tokens // spec.granule_tokens
        self._sizes = [spec.granule_tokens * group.token_bytes for group in spec.groups]
        if any(size % driver.granularity for size in self._sizes) or spec.num_granules % spec.block_granules:
            raise ValueError(f"granules are whole pages of {driver.granularity} bytes, and the pool whole blocks")
        self._mappings = CudaMappings(driver, ArenaStats(), reclaim)
        self._views = ViewMap(spec.num_slots, spec.block_granules)
        with ExitStack() as undo:
            places = spec.num_slots * self._slot_granules + 1
            self.guards = [self._mappings.reserve(undo, places * size) for size in self._sizes]
            self.slots = [guard + size for guard, size in zip(self.guards, self._sizes, strict=True)]
            for guard, size in zip(self.guards, self._sizes, strict=True):
                undo.callback(self._mappings.drop, guard, size, self._mappings.make(guard, size))
                driver.allow(guard, size)
            self._blocks = CudaBlocks(spec, self._mappings, undo)
            undo.callback(self._hide_all)
            self._undo = undo.pop_all()
        self.homes = self._blocks.homes
        self._mappings.stats = stats

    def show(self, view: View) -> Iterator[bool]:
        """Map a view in every group, in place of what is there. Its block must be ready for it.

        After `MemoryError` or `OSError` the positions show nothing. Raises `ValueError` where that would cut a block in
        two that the slot shows whole.
        """
        if view in self._views:
            return
        start = time.perf_counter()
        yield from self.clear(view)
        with ExitStack() as undo:
            for address, size, handles in zip(self._addresses(view), self._sizes, self._blocks.handles, strict=True):
                self._mappings.map(undo, address, view.length * size, handles[view.granule])
                yield False
            undo.pop_all()
        self._views.add(view)
        self._mappings.note(start, "show")

    def clear(self, view: View) -> Iterator[bool]:
        """Unmap what is in the place of a view. Raises `ValueError` as `show`."""
        while others := self._views.overlapping(view.slot, view.start, view.start + view.length):
            if others[0].start < view.start:
                whole = others[0].start
                raise ValueError(f"slot {view.slot} shows a whole block at {whole}, which {view.start} would cut")
            self._remove(others[0])
            yield False

    def hide(self, slot: int, keep: int) -> Iterator[bool]:
        """Unmap what a slot shows from position `keep` on. A block that starts before stays, for it is one mapping."""
        start = time.perf_counter()
        while views := self._views.from_on(slot, keep):
            self._remove(views[0])
            yield False
        self._mappings.note(start, "hide")

    def convert(self, block: int, whole: bool) -> Iterator[bool]:
        """Make a block whole or split, which ends all views of it, and what it contains is zero then."""
        if self._blocks.is_ready(block, whole):
            return
        start = time.perf_counter()
        first = block * self._spec.block_granules
        for granule in range(first, first + self._spec.block_granules):
            # Hides may take views away meanwhile.
            while views := self._views.of(granule):
                self._remove(views[0])
                yield False
        yield from self._blocks.convert(block, whole)
        self._mappings.stats.joins += whole
        self._mappings.stats.splits += not whole
        self._mappings.note(start, "join" if whole else "split")

    def close(self) -> None:
        """Give everything back, once the device has finished; may be called again."""
        self._driver.synchronize()
        self._undo.close()

    def _hide_all(self) -> None:
        with ExitStack() as rest:
            for view in self._views.all():
                rest.callback(self._remove, view)

    def _remove(self, view: View) -> None:
        """Unmap a view in every group, whatever errors there are on the way, and at once: its positions may be those of
        another job."""
        self._views.remove(view)
        with ExitStack() as rest:
            for address, size in zip(self._addresses(view), self._sizes, strict=True):
                rest.callback(self._mappings.unmap, address, view.length * size)

    def _addresses(self, view: View) -> list[int]:
        """Where a view begins in each group."""
        place = view.slot * self._slot_granules + view.start
        return [start + place * size for start, size in zip(self.slots, self._sizes, strict=True)]
