"""Kernels compiled by several processes at once into triton's on-disk cache, while the weights load.

Processes, since compiling holds Python's lock most of the time: two threads gain a third. They are given the GPU's kind
and touch no GPU. Run by an engine as `python -m bladellm_runtime.engine.compile_kernels`, one line of JSON on standard
input: `{"target": [backend, arch, warp size], "kernels": [...]}`.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.kernel_compiles import KERNEL_COMPILES
from bladellm_runtime.engine.kernel_record import (
    Description,
    cache_hash,
    describe,
    make_hashes_reproducible,
    options,
    read_record,
    record_path,
    source,
    write_record,
)

MAX_PROCESSES = 8
KERNELS_PER_PROCESS = 2
"""Fewer are not worth the seconds that a process takes to import torch."""

logger = logging.getLogger(__name__)


def compile_ahead(args: EngineArgs, folder: Path, device: torch.device) -> "Compiling":
    """Count what is compiled from now on, and start to compile what the last engine of this kind needed."""
    if device.type != "cuda":
        return Compiling()
    from triton.runtime import driver

    count_compiles(device)
    return start_compiling(read_record(record_path(args, folder, device)), driver.active.get_current_target())


def count_compiles(device: torch.device) -> None:
    """Count what is compiled from now on, by hashes that are the same in every process."""
    if device.type == "cuda":
        make_hashes_reproducible()
        KERNEL_COMPILES.watch()


def keep_kernel_list(args: EngineArgs, folder: Path, device: torch.device) -> None:
    """Write down what this start needed, for the next one."""
    if device.type == "cuda":
        kernels = [describe(src, metadata) for src, metadata in KERNEL_COMPILES.seen]
        write_record(record_path(args, folder, device), (kernel for kernel in kernels if kernel is not None))
        logger.info("%s", KERNEL_COMPILES.summary())


class Compiling:
    """Processes that compile; `kernels` of them in all."""

    def __init__(self, kernels: int = 0, processes: "Sequence[subprocess.Popen[bytes]]" = ()) -> None:
        self.kernels = kernels
        self._processes = processes

    def wait(self) -> None:
        """Wait for the end of all. A process that failed costs time only: its kernels are compiled when needed."""
        failed = [process.returncode for process in self._processes if process.wait()]
        if failed:
            logger.warning("%d of %d processes that compile kernels failed", len(failed), len(self._processes))


def start_compiling(kernels: Sequence[Description], target: Any) -> Compiling:
    """Start to compile, for a triton `GPUTarget`, those kernels that triton's cache lacks."""
    lacking = [kernel for kernel in kernels if not is_cached(kernel, target)]
    count = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(lacking) // KERNELS_PER_PROCESS)
    shares = [lacking[first::count] for first in range(count)]
    return Compiling(len(lacking) if count else 0, [_start_process(share, target) for share in shares])


def is_cached(kernel: Description, target: Any) -> bool:
    """Whether triton's cache has a kernel, or it cannot be compiled any more: there is nothing to do for it."""
    from triton.runtime.cache import get_cache_manager

    try:
        cache = get_cache_manager(cache_hash(kernel, target))
    except Exception as error:  # the function is gone, or takes other arguments now
        logger.debug("kernel %s is out of date: %s", kernel.get("function"), error)
        return True
    name = kernel["function"].rpartition(".")[2].rpartition(":")[2]
    return bool(cache.get_group(f"{name[:150]}.json"))


def _start_process(kernels: Sequence[Description], target: Any) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE)
    assert process.stdin is not None
    order = {"target": [target.backend, target.arch, target.warp_size], "kernels": kernels}
    # One that ends before it has read all is counted by `Compiling.wait`, as others that fail.
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(order).encode())
    with suppress(BrokenPipeError):
        process.stdin.close()
    return process


def main() -> None:
    """Compile what standard input says."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaLauncher

    make_hashes_reproducible()
    order = json.load(sys.stdin)
    for kernel in order["kernels"]:
        try:
            compiled = triton.compile(source(kernel), target=GPUTarget(*order["target"]), options=options(kernel))
            # The C function that launches it, which triton builds with the C compiler and caches as well.
            CudaLauncher(compiled.src, compiled.metadata)
        except Exception as error:  # it does not compile any more, or not here: the engine says so if it needs it
            logger.debug("kernel %s was not compiled: %s", kernel.get("function"), error)


if __name__ == "__main__":
    main()
