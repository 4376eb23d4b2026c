"""CUDA virtual memory: `MemoryDriver`, what an arena needs of it, and `CudaDriver`, which is cuda.bindings.driver."""

import functools
import importlib
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from bladellm_runtime.kv.dlpack import bytes_at

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"
NOT_READY = "CUDA_ERROR_NOT_READY"


class MemoryDriver(Protocol):
    """Addresses and physical memory of one device. Sizes and addresses in bytes, multiples of `granularity`.

    Methods may be called from any thread that called `attach`, and raise `MemoryError` where memory is short, `OSError`
    with the driver's name of the error otherwise. None waits for work on the device, except `synchronize`.
    """

    granularity: int

    def attach(self) -> None:
        """Make the device's context current in the calling thread."""

    def reserve(self, size: int) -> int:
        """A range of addresses without memory."""

    def free(self, address: int, size: int) -> None:
        """Give a reserved range back, in which nothing is mapped any more."""

    def create(self, size: int) -> int:
        """Physical memory; its handle. What it contains is unknown."""

    def release(self, handle: int) -> None:
        """Give physical memory back, which is mapped nowhere any more."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Show all of a handle, `size` bytes, at reserved addresses where nothing is mapped, to read and write."""

    def place(self, address: int, size: int, handle: int) -> None:
        """The same, but not to be read or written before `allow`."""

    def allow(self, address: int, size: int) -> None:
        """Let what `place` has put at these addresses be read and written; none of them may be without memory."""

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map` or `place`, all of it."""

    def zero(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Begin to fill mapped (address, size) ranges with zeros."""

    def zeroed(self) -> bool:
        """Whether everything that `zero` was given is zero by now."""

    def synchronize(self) -> None:
        """Wait for all work on the device."""


class CudaDriver:
    """The driver's calls for one device. `bindings` is the module `cuda.bindings.driver`.

    Holds a reference to the device's primary context, torch's own, for the life of the process.
    """

    def __init__(self, device: int, bindings: Any) -> None:
        self._cuda = bindings
        self._call("cuInit", 0)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self.attach()
        self._property = bindings.CUmemAllocationProp()
        self._property.type = bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = device
        access = bindings.CUmemAccessDesc()
        access.location = self._property.location
        access.flags = bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._access = [access]
        minimum = bindings.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._property, minimum))
        _, highest = self._call("cuCtxGetStreamPriorityRange")
        non_blocking = int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING)
        self._stream = self._call("cuStreamCreateWithPriority", non_blocking, highest)

    def attach(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def reserve(self, size: int) -> int:
        return int(self._call("cuMemAddressReserve", size, 0, 0, 0))

    def free(self, address: int, size: int) -> None:
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        return int(self._call("cuMemCreate", size, self._property, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        self.place(address, size, handle)
        try:
            self.allow(address, size)
        except (MemoryError, OSError):
            self.unmap(address, size)
            raise

    def place(self, address: int, size: int, handle: int) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)

    def allow(self, address: int, size: int) -> None:
        self._call("cuMemSetAccess", address, size, self._access, 1)

    def unmap(self, address: int, size: int) -> None:
        self._call("cuMemUnmap", address, size)

    def zero(self, ranges: Sequence[tuple[int, int]]) -> None:
        # On a stream of its own, so that `zeroed` is about this alone.
        for address, size in ranges:
            self._call("cuMemsetD8Async", address, 0, size, self._stream)

    def zeroed(self) -> bool:
        (error,) = self._cuda.cuStreamQuery(self._stream)
        return error.name != NOT_READY and self._check("cuStreamQuery", error)

    def synchronize(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver; its result, a tuple if there are several. Raises for any error."""
        error, *results = getattr(self._cuda, name)(*arguments)
        self._check(name, error)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, name: str, error: Any) -> bool:
        """Raise for anything but success."""
        if int(error):
            kind = MemoryError if error.name == OUT_OF_MEMORY else OSError
            raise kind(f"{name}: {error.name}")
        return True


@functools.cache
def cuda_driver(device: int) -> CudaDriver:
    """The driver for a device of this process, opened once.

    Raises `OSError` where there is none, or no cuda-bindings: the driver's Python module, which torch brings along.
    """
    try:
        torch.cuda.init()
        return CudaDriver(device, importlib.import_module("cuda.bindings.driver"))
    except (ImportError, RuntimeError, AssertionError) as error:
        raise OSError(f"CUDA driver calls: {error}") from error


def probe(driver: MemoryDriver, device: torch.device) -> None:
    """Check that one piece of memory can be mapped at two addresses and read at one what was written at the other.

    Raises `OSError` or `MemoryError` where it cannot.
    """
    size = driver.granularity
    with ExitStack() as undo:
        first = driver.reserve(2 * size)
        undo.callback(driver.free, first, 2 * size)
        handle = driver.create(size)
        undo.callback(driver.release, handle)
        for address in (first, first + size):
            driver.map(address, size, handle)
            undo.callback(driver.unmap, address, size)
        both = bytes_at(first, 2 * size, device)
        driver.zero([(first, size)])
        driver.synchronize()
        both[:size].add_(7)
        seen = int(both[size:].sum())
    if seen != 7 * size:
        raise OSError("memory mapped at two addresses is not the same at both")
