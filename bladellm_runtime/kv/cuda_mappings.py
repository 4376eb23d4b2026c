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
            start = time.perf_counter()
            self.driver.place(address, size, handle)
            self.stats.mapped(time.perf_counter() - start)
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

    def show(self, undo: ExitStack, address: int, size: int, handle: int, allow_from: int | None) -> None:
        """Put all of a handle at an address; allow_from: let all from there on be touched, or leave that to a later
        call."""
        start = time.perf_counter()
        self.driver.place(address, size, handle)
        undo.callback(self.unmap, address, size)
        if allow_from is not None:
            self.driver.allow(allow_from, address + size - allow_from)
        self.stats.mapped(time.perf_counter() - start)

    def unmap(self, address: int, size: int) -> None:
        """Undo one `show`."""
        self.driver.unmap(address, size)
        self.stats.unmaps += 1

    def _create(self, size: int) -> int:
        """The handle of new memory."""
        try:
            return self.driver.create(size)
        except MemoryError:
            self._reclaim()
            return self.driver.create(size)

    def note(self, start: float, kind: str) -> None:
        """Something of a kind has been done since `start`."""
        self.stats.events.append(MemoryEvent(start, time.perf_counter(), kind))
