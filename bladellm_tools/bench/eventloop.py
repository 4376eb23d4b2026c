"""The event loop a measurement runs on: fast, without pauses of the garbage collector, with enough open files."""

import asyncio
import gc
import os
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

Result = TypeVar("Result")
MOST_STREAMS = 65536
"""Open files to be ready for."""


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """`asyncio.run` on uvloop where it is installed: half the client's cost a chunk."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    result: Result = uvloop.run(main)
    return result


@contextmanager
def without_collector() -> Iterator[None]:
    """Cyclic garbage collection off: a full collection stops the client for longer than a token takes."""
    enabled, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextmanager
def first_served() -> Iterator[bool]:
    """Run this thread before all ordinary ones where the system allows it; yields whether it does.

    A client that waits for the processor behind the server it measures, on a machine they share, sends late and stamps
    late. Its share of the processor is the same either way, and reported. Child processes do not inherit it.
    """
    ordinary = goes_first() is False and go_first()
    try:
        yield goes_first() is True
    finally:
        if ordinary:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def goes_first() -> bool | None:
    """Whether this thread has a real-time policy already; None where there are no policies."""
    if not hasattr(os, "sched_getscheduler"):
        return None
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK in (os.SCHED_FIFO, os.SCHED_RR)


def go_first() -> bool:
    """Take the lowest real-time priority; returns whether the system let it."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except OSError:
        return False
    return True


def raise_file_limit() -> int:
    """Allow as many open files as the system lets this process have; returns how many. Every stream needs one."""
    try:
        import resource
    except ImportError:
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):  # some systems have a lower limit of their own
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limit = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    grow_file_table(min(limit, MOST_STREAMS) - 1)
    return limit


def grow_file_table(highest: int) -> None:
    """Make the kernel's table of open files large now: growing it at the 512th stream stops a process for 15 ms."""
    with open(os.devnull, "rb") as file:
        try:
            os.fstat(highest)
        except OSError:
            os.close(os.dup2(file.fileno(), highest))
