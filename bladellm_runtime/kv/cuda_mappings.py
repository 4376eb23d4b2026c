"""`CudaMappings`: the driver's calls that create and map KV memory, counted and timed."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from bladellm_runtime.kv.arena import ArenaStats, MemoryEvent
from bladellm_runtime.kv.cuda_driver import MemoryDriver


class CudaMappings:
    """`stats` may be replaced. `reclaim` is called when memory is short, before a second and last try."""

    def __init__(self, driver: MemoryDriver, stats: ArenaStats, reclaim: Callable[[], None]) -> None:
        self.driver = driver
        self.stats = stats
        self._reclaim = reclaim

    def reserve(self, undo: ExitStack, size: int) -> int:
        """A range of addresses, in bytes."""
        address = self.driver.reserve(size)
        undo.callback(self.driver.free, address, size)
        return address

    def create(self, undo: ExitStack, size: int) -> int:
        """The handle of new memory."""
        try:
            handle = self.driver.create(size)
        except MemoryError:
            self._reclaim()
            handle = self.driver.create(size)
        undo.callback(self.driver.release, handle)
        return handle

    def map(self, undo: ExitStack, address: int, size: int, handle: int) -> None:
        """Show all of a handle at an address."""
        start = time.perf_counter()
        self.driver.map(address, size, handle)
        self.stats.mapped(time.perf_counter() - start)
        undo.callback(self.unmap, address, size)

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`."""
        self.driver.unmap(address, size)
        self.stats.unmaps += 1

    def note(self, start: float, kind: str) -> None:
        """Something of a kind has been done since `start`."""
        self.stats.events.append(MemoryEvent(start, time.perf_counter(), kind))
