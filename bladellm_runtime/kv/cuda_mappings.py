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

    def make(self, address: int, size: int) -> int:
        """Put new memory at an address, to be touched after the driver's `allow`; returns its handle."""
        handle = self._create(size)
        try:
            self._timed(self.driver.place, address, size, handle)
        except BaseException:
            self.driver.release(handle)
            raise
        return handle

    def drop(self, address: int, size: int, handle: int) -> None:
        """Undo one `make`, the rest of it also where a part fails."""
        try:
            self.unmap(address, size)
        finally:
            self.driver.release(handle)

    def map(self, undo: ExitStack, address: int, size: int, handle: int) -> None:
        """Show all of a handle at an address."""
        self._timed(self.driver.map, address, size, handle)
        undo.callback(self.unmap, address, size)

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`."""
        self.driver.unmap(address, size)
        self.stats.unmaps += 1

    def _create(self, size: int) -> int:
        """The handle of new memory."""
        try:
            return self.driver.create(size)
        except MemoryError:
            self._reclaim()
            return self.driver.create(size)

    def _timed(self, call: Callable[[int, int, int], None], address: int, size: int, handle: int) -> None:
        """Make one mapping."""
        start = time.perf_counter()
        call(address, size, handle)
        self.stats.mapped(time.perf_counter() - start)

    def note(self, start: float, kind: str) -> None:
        """Something of a kind has been done since `start`."""
        self.stats.events.append(MemoryEvent(start, time.perf_counter(), kind))
