"""Waiting for absolute times, more exactly than the event loop's own timers, which count whole milliseconds."""

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

CLOCK_MONOTONIC = 1
TFD_NONBLOCK, TFD_CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC if hasattr(os, "O_CLOEXEC") else 0
SHORTEST_NS = 1
"""A kernel timer set to 0 is switched off."""
SPIN_SECONDS = 0.002
"""How long before a deadline a timer without kernel support stops sleeping and yields in a loop."""

clock = time.perf_counter


class DeadlineTimer:
    """One timer that calls back on the running event loop at an absolute `clock()` time.

    On Linux a timerfd wakes the loop some 50 µs late at worst, at no cost while it waits. Elsewhere the loop sleeps to
    2 ms before the deadline and then yields until it has come.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._callback = callback
        self._deadline = 0.0
        self._handle: asyncio.Handle | None = None
        self._kernel = KernelTimer.create()
        if self._kernel is not None:
            self._loop.add_reader(self._kernel.fd, self._on_readable)

    def arm(self, deadline: float) -> None:
        """Call back at `deadline`, which replaces an earlier one; a time that has passed means as soon as possible."""
        self._deadline = deadline
        if self._kernel is not None:
            self._kernel.set(deadline - clock())
        else:
            self._disarm_loop()
            delay = max(deadline - clock() - SPIN_SECONDS, 0.0)
            self._handle = self._loop.call_later(delay, self._spin)

    def close(self) -> None:
        """Never call back again."""
        self._disarm_loop()
        if self._kernel is not None:
            self._loop.remove_reader(self._kernel.fd)
            self._kernel.close()
            self._kernel = None

    def _on_readable(self) -> None:
        if self._kernel is not None and self._kernel.expired():
            self._callback()

    def _spin(self) -> None:
        if clock() < self._deadline:
            self._handle = self._loop.call_soon(self._spin)
        else:
            self._callback()

    def _disarm_loop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


class KernelTimer:
    """A Linux timerfd (timerfd_create(2)), readable when its time has come."""

    def __init__(self, library: Any, fd: int) -> None:
        self._library = library
        self.fd = fd

    @classmethod
    def create(cls) -> "KernelTimer | None":
        """A timer, or None where the system has none."""
        if not sys.platform.startswith("linux"):
            return None
        library = ctypes.CDLL(None, use_errno=True)
        fd = library.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
        return cls(library, fd) if fd >= 0 else None

    def set(self, delay: float) -> None:
        """Expire once, `delay` seconds from now."""
        nanoseconds = max(int(delay * 1e9), SHORTEST_NS)
        # struct itimerspec: interval (none), then the time, each in seconds and nanoseconds.
        value = (ctypes.c_long * 4)(0, 0, nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        self._library.timerfd_settime(self.fd, 0, ctypes.byref(value), None)

    def expired(self) -> bool:
        """True once for every expiry."""
        with contextlib.suppress(BlockingIOError):
            return len(os.read(self.fd, 8)) == 8
        return False

    def close(self) -> None:
        """Give the file descriptor back."""
        os.close(self.fd)


class Pacer:
    """Waits for one deadline after the other."""

    def __init__(self) -> None:
        self._waiter: asyncio.Future[None] | None = None
        self._timer = DeadlineTimer(self._wake)

    async def until(self, deadline: float) -> None:
        """Return at `deadline`, or at once if it has passed."""
        if clock() >= deadline:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        self._timer.arm(deadline)
        await self._waiter

    def close(self) -> None:
        """Let go of the timer."""
        self._timer.close()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
