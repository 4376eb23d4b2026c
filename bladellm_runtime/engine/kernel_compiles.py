"""Counts the kernels, Triton's and those in CUDA C++, that this process compiles, and those it compiles when it should
not: after ready.

A kernel taken from a cache on disk counts as well: it stalls the step that first needs it, and on a machine with an
empty cache it would have been compiled there.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bladellm_kernels import cuda_compiler

logger = logging.getLogger(__name__)


class KernelCompiles:
    """compiled, loaded: kernels compiled and those found in the on-disk cache; seconds: of compiling. seen: what triton
    said of both (source, metadata) while they were `expected`; late_names: those that came outside, after ready."""

    def __init__(self) -> None:
        self.compiled = 0
        self.loaded = 0
        self.seconds = 0.0
        self.late_names: list[str] = []
        self.seen: list[tuple[Any, dict[str, Any]]] = []
        self._expecting = 0
        self._before: Any = None
        self._watching = False
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Count from now on. Imports triton."""
        from triton import knobs

        with self._lock:
            if not self._watching:
                self._watching = True
                cuda_compiler.listener = self.note_cubin
                self._before, knobs.compilation.listener = knobs.compilation.listener, self.note

    @contextmanager
    def expected(self) -> Iterator[None]:
        """While an engine starts, kernels may be compiled, in any thread; blocks may overlap."""
        with self._lock:
            self._expecting += 1
        try:
            yield
        finally:
            with self._lock:
                self._expecting -= 1

    def note(self, *, src: Any, metadata: dict[str, Any], times: Any, cache_hit: bool, **more: Any) -> None:
        """Count a kernel; triton calls it for each one it compiles or takes from its cache. `times` is in µs."""
        late = self._count(src.name, cache_hit, times.total / 1e6)
        if not late:
            self.seen.append((src, metadata))
        else:
            what = [getattr(src, part, {}) for part in ("signature", "constants", "attrs")]
            logger.debug("kernel %s was compiled for %s, %s, %s", src.name, *what)
        if self._before is not None:
            self._before(src=src, metadata=metadata, times=times, cache_hit=cache_hit, **more)

    def note_cubin(self, name: str, found: bool, seconds: float) -> None:
        """The same of a source in CUDA C++."""
        self._count(name, found, seconds)

    def _count(self, name: str, found: bool, seconds: float) -> bool:
        """Whether the kernel comes after ready."""
        with self._lock:
            self.loaded += found
            self.compiled += not found
            self.seconds += 0.0 if found else seconds
            late = not self._expecting
            if late:
                self.late_names.append(name)
        if late:
            logger.log(
                logging.WARNING if self.late == 1 else logging.DEBUG,
                "kernel %s was compiled after the start; later ones are only counted (kernel_compiles_after_ready)",
                name,
            )
        return late

    @property
    def late(self) -> int:
        """How many kernels came after ready."""
        return len(self.late_names)

    def summary(self) -> str:
        """What was compiled so far, in one line."""
        return f"{self.compiled} kernels compiled in {self.seconds:.1f} s, {self.loaded} found in caches on disk"


KERNEL_COMPILES = KernelCompiles()
"""Of this process: triton has one listener."""
