"""`CudaMemory`: physical CUDA memory of a KV cache and its mappings. Knows granules and slots, but no tensors."""

import time
from collections.abc import Callable, Iterator, Sequence
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

    def show(self, views: Sequence[View]) -> Iterator[bool]:
        """Map views that lie beside each other in every group, in place of what is there. Their blocks must be ready
        for it.

        After `MemoryError` or `OSError` the positions show nothing, but for what they showed already. Raises
        `ValueError` where that would cut a block in two that the slot shows whole.
        """
        start = time.perf_counter()
        missing = [view for view in views if view not in self._views]
        if not missing:
            return
        for view in missing:
            yield from self.clear(view)
        with ExitStack() as undo:
            for group in range(len(self._sizes)):
                yield from self._map(undo, group, missing)
            undo.pop_all()
        for view in missing:
            self._views.add(view)
        self._mappings.note(start, "show")

    def _map(self, undo: ExitStack, group: int, views: Sequence[View]) -> Iterator[bool]:
        """Map views in a group, and let all from the first to the last be touched: what lies between is in view."""
        places = [self._extent(group, view) for view in views]
        for view, (address, size) in zip(views, places, strict=True):
            allow_from = places[0][0] if view is views[-1] else None
            self._mappings.show(undo, address, size, self._blocks.handles[group][view.granule], allow_from)
            yield False

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
            for group in range(len(self._sizes)):
                rest.callback(self._mappings.unmap, *self._extent(group, view))

    def _extent(self, group: int, view: View) -> tuple[int, int]:
        """Where a view begins in a group, and its bytes."""
        size = self._sizes[group]
        return self.slots[group] + (view.slot * self._slot_granules + view.start) * size, view.length * size
