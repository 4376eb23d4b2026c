"""`CudaMemory`: physical CUDA memory of a KV cache and its mappings. Knows granules and slots, but no tensors."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from bladellm_runtime.kv.arena import ArenaStats, MemoryEvent
from bladellm_runtime.kv.cuda_driver import MemoryDriver
from bladellm_runtime.kv.cuda_views import View, ViewMap
from bladellm_runtime.kv.operations import Show
from bladellm_runtime.kv.spec import KvSpec


class CudaMemory:
    """Two address ranges a layer group: `slots`, where slots show granules, and `homes`, where every granule is
    mapped at offset granule * size as long as it exists.

    Before the slots, from `guards` on, lies a granule of memory of its own: launching a kernel checks that the first
    address of a tensor is mapped, which no slot's is for certain.

    A block is *whole*, one handle a group, or *split*, one handle a granule and group; or absent, for want of memory.
    It is converted when it is shown the other way, for a handle cannot be mapped in part: that takes away what the
    block is still shown as, unmaps its home, releases its handles and creates others, whose memory is zeroed.

    Nothing but `close` waits for kernels. That is safe because the accounting takes a block otherwise, and shows other
    granules at a position, only after the last step that touched what was there.

    For one thread at a time. `reclaim` is called when memory is short, before a second and last try.
    """

    def __init__(self, spec: KvSpec, driver: MemoryDriver, stats: ArenaStats, reclaim: Callable[[], None]) -> None:
        self._spec = spec
        self._driver = driver
        self._stats = ArenaStats()
        self._reclaim = reclaim
        self._slot_granules = spec.max_tokens // spec.granule_tokens
        self._sizes = [spec.granule_tokens * group.token_bytes for group in spec.groups]
        if any(size % driver.granularity for size in self._sizes) or spec.num_granules % spec.block_granules:
            raise ValueError(f"granules are whole pages of {driver.granularity} bytes, and the pool whole blocks")
        self._views = ViewMap(spec.num_slots, spec.block_granules)
        self._handles: list[dict[int, int]] = [{} for _ in self._sizes]
        """Of each group, by the first granule the handle holds."""
        self._blocks: list[ExitStack | None] = [None] * (spec.num_granules // spec.block_granules)
        """What undoes each block; None for absent ones."""
        self._whole = [True] * len(self._blocks)
        with ExitStack() as undo:
            places = spec.num_slots * self._slot_granules + 1
            self.guards = [self._reserve(undo, places * size) for size in self._sizes]
            self.slots = [guard + size for guard, size in zip(self.guards, self._sizes, strict=True)]
            for guard, size in zip(self.guards, self._sizes, strict=True):
                self._guard(undo, guard, size)
            self.homes = [self._reserve(undo, spec.num_granules * size) for size in self._sizes]
            undo.callback(self._drop_all)
            for block in range(len(self._blocks)):
                self._build(block, whole=block >= spec.split_blocks)
            self._undo = undo.pop_all()
        self._stats = stats

    def show(self, view: Show) -> None:
        """Carry out a `Show`. On `MemoryError` or `OSError` the slot shows its granules before the position only.

        Raises `ValueError` where that would cut a block in two that the slot shows whole.
        """
        start = time.perf_counter()
        count = self._spec.block_granules if view.whole else 1
        try:
            for block in dict.fromkeys(granule // self._spec.block_granules for granule in view.granules):
                self._convert(block, view.whole)
            for i in range(0, len(view.granules), count):
                self._place(View(view.slot, view.position + i, view.granules[i], count))
        except (MemoryError, OSError):
            self.hide(view.slot, view.position)
            raise
        self._note(start, "show")

    def hide(self, slot: int, keep: int) -> None:
        """Unmap what a slot shows from position `keep` on. A block that starts before stays, for it is one mapping."""
        start = time.perf_counter()
        for view in self._views.from_on(slot, keep):
            self._remove(view)
        self._note(start, "hide")

    def close(self) -> None:
        """Give everything back, once the device has finished; may be called again."""
        self._driver.synchronize()
        self._undo.close()

    def _reserve(self, undo: ExitStack, size: int) -> int:
        address = self._driver.reserve(size)
        undo.callback(self._driver.free, address, size)
        return address

    def _guard(self, undo: ExitStack, address: int, size: int) -> None:
        handle = self._create(size)
        undo.callback(self._driver.release, handle)
        self._map(undo, address, size, handle)

    def _convert(self, block: int, whole: bool) -> None:
        """Make a block whole, or split."""
        if self._blocks[block] is not None and (self._whole[block] == whole or self._spec.block_granules == 1):
            return
        start = time.perf_counter()
        self._drop(block)
        self._build(block, whole)
        self._stats.joins += whole
        self._stats.splits += not whole
        self._note(start, "join" if whole else "split")

    def _build(self, block: int, whole: bool) -> None:
        """Create an absent block's memory, zeroed, and map it at home. Changes nothing when there is not enough."""
        granules = range(block * self._spec.block_granules, (block + 1) * self._spec.block_granules)
        step = len(granules) if whole else 1
        with ExitStack() as undo:
            for size, home, handles in zip(self._sizes, self.homes, self._handles, strict=True):
                for granule in granules[::step]:
                    handles[granule] = self._create(step * size)
                    undo.callback(self._driver.release, handles[granule])
                    self._map(undo, home + granule * size, step * size, handles[granule])
            at_home = zip(self._sizes, self.homes, strict=True)
            self._driver.zero([(home + granules[0] * size, len(granules) * size) for size, home in at_home])
            self._blocks[block] = undo.pop_all()
        self._whole[block] = whole

    def _drop(self, block: int) -> None:
        """Unmap a block everywhere and release its handles."""
        undo, self._blocks[block] = self._blocks[block], None
        if undo is None:
            return
        first = block * self._spec.block_granules
        for granule in range(first, first + self._spec.block_granules):
            for view in self._views.of(granule):
                self._remove(view)
        undo.close()

    def _drop_all(self) -> None:
        for block in range(len(self._blocks)):
            self._drop(block)

    def _create(self, size: int) -> int:
        try:
            return self._driver.create(size)
        except MemoryError:
            self._reclaim()
            return self._driver.create(size)

    def _place(self, view: View) -> None:
        """Map a view in every group, in place of what is there."""
        if view in self._views:
            return
        for other in self._views.overlapping(view.slot, view.start, view.start + view.length):
            if other.start < view.start:
                raise ValueError(f"slot {view.slot} shows a whole block at {other.start}, which {view.start} would cut")
            self._remove(other)
        with ExitStack() as undo:
            for address, size, handles in zip(self._addresses(view), self._sizes, self._handles, strict=True):
                self._map(undo, address, view.length * size, handles[view.granule])
            undo.pop_all()
        self._views.add(view)

    def _remove(self, view: View) -> None:
        """Unmap a view in every group."""
        self._views.remove(view)
        for address, size in zip(self._addresses(view), self._sizes, strict=True):
            self._unmap(address, view.length * size)

    def _addresses(self, view: View) -> list[int]:
        """Where a view begins in each group."""
        place = view.slot * self._slot_granules + view.start
        return [start + place * size for start, size in zip(self.slots, self._sizes, strict=True)]

    def _map(self, undo: ExitStack, address: int, size: int, handle: int) -> None:
        start = time.perf_counter()
        self._driver.map(address, size, handle)
        self._stats.mapped(time.perf_counter() - start)
        undo.callback(self._unmap, address, size)

    def _unmap(self, address: int, size: int) -> None:
        self._driver.unmap(address, size)
        self._stats.unmaps += 1

    def _note(self, start: float, kind: str) -> None:
        self._stats.events.append(MemoryEvent(start, time.perf_counter(), kind))
