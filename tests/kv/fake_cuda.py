"""The driver's virtual memory calls on a memory file: addresses, handles and contents are real, and rules are kept.

What the driver leaves undefined or forbids is an `AssertionError` here. Sizes are multiples of 4 KiB, not 2 MiB.
"""

import ctypes
import enum
import os
import threading
from bisect import bisect_right
from types import SimpleNamespace

from bladellm_runtime.kv.virtual import AddressRange

PAGE = 4096


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_UNKNOWN = 999


OK = (CUresult.CUDA_SUCCESS,)


class FakeCuda:
    """In place of the module cuda.bindings.driver.

    `capacity`: bytes of physical memory. `fail`: (number of calls that succeed first, error) by the call's name.
    `aliases`: whether memory mapped twice is the same memory.
    """

    CUresult = CUresult
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, capacity=1 << 40):
        self.capacity = capacity
        self.aliases = True
        self.calls = []
        self.fail = {}
        self.reservations = {}
        self.handles = {}
        self.mappings = {}
        self._thread = threading.local()
        self._fd = os.memfd_create("bladellm-fake-cuda")
        self._file_end = 0
        self._free_places = {}
        self._last_handle = 1000

    def dispose(self):
        """Close the memory file; nothing may be left."""
        os.close(self._fd)
        assert not self.mappings, "something is still mapped"
        assert not self.handles, "handles were not released"
        assert not self.reservations, "addresses were not freed"

    def CUmemAllocationProp(self):
        return SimpleNamespace(type=None, location=SimpleNamespace(type=None, id=None))

    def CUmemAccessDesc(self):
        return SimpleNamespace(location=None, flags=None)

    def cuInit(self, flags):
        return OK

    def cuDeviceGet(self, ordinal):
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDevicePrimaryCtxRetain(self, device):
        return CUresult.CUDA_SUCCESS, "context"

    def cuCtxSetCurrent(self, context):
        assert context == "context"
        self._thread.context = context
        return OK

    def cuCtxGetStreamPriorityRange(self):
        return CUresult.CUDA_SUCCESS, 0, -5

    def cuStreamCreateWithPriority(self, flags, priority):
        assert (flags, priority) == (1, -5)
        return CUresult.CUDA_SUCCESS, "stream"

    def cuStreamQuery(self, stream):
        assert stream == "stream"
        return self._outcome("cuStreamQuery")

    def cuCtxSynchronize(self):
        return self._outcome("cuCtxSynchronize")

    def cuMemGetAllocationGranularity(self, prop, option):
        assert prop.location.type == prop.type == 1
        return CUresult.CUDA_SUCCESS, PAGE

    def cuMemAddressReserve(self, size, alignment, address, flags):
        assert size > 0
        assert size % PAGE == alignment == address == flags == 0
        if (outcome := self._outcome("cuMemAddressReserve")) != OK:
            return *outcome, None
        addresses = AddressRange(size)
        self.reservations[addresses.address] = addresses
        return CUresult.CUDA_SUCCESS, addresses.address

    def cuMemAddressFree(self, address, size):
        assert self.reservations[address].size == size
        assert not any(address <= start < address + size for start in self.mappings), "freed with memory in it"
        self.reservations.pop(address).close()
        return self._outcome("cuMemAddressFree")

    def cuMemCreate(self, size, prop, flags):
        assert size > 0
        assert size % PAGE == flags == 0
        assert (prop.type, prop.location.type) == (1, 1)
        outcome = self._outcome("cuMemCreate")
        if outcome == OK and sum(length for _, length in self.handles.values()) + size > self.capacity:
            outcome = (CUresult.CUDA_ERROR_OUT_OF_MEMORY,)
        if outcome != OK:
            return *outcome, None
        self._last_handle += 1
        self.handles[self._last_handle] = (self._place(size), size)
        return CUresult.CUDA_SUCCESS, self._last_handle

    def cuMemRelease(self, handle):
        assert all(mapping["handle"] != handle for mapping in self.mappings.values()), "released while mapped"
        place, size = self.handles.pop(handle)
        self._free_places.setdefault(size, []).append(place)
        return self._outcome("cuMemRelease")

    def cuMemMap(self, address, size, offset, handle, flags):
        assert address % PAGE == flags == 0
        if offset:
            return (CUresult.CUDA_ERROR_NOT_SUPPORTED,)
        assert size == self.handles[handle][1], "a handle is mapped as a whole"
        self._reservation(address, size)
        assert not self._overlapping(address, size), "mapped over a mapping"
        if (outcome := self._outcome("cuMemMap")) == OK:
            self.mappings[address] = {"size": size, "handle": handle, "access": False}
        return outcome

    def cuMemSetAccess(self, address, size, descriptions, count):
        assert len(descriptions) == count == 1
        assert descriptions[0].flags == 3
        assert descriptions[0].location.type == 1
        covered = self._overlapping(address, size)
        assert sum(self.mappings[start]["size"] for start in covered) == size, "access to addresses without memory"
        if (outcome := self._outcome("cuMemSetAccess")) == OK:
            for start in covered:
                mapping = self.mappings[start]
                mapping["access"] = True
                base = self._reservation(start, mapping["size"])
                place = self.handles[mapping["handle"]][0] if self.aliases else self._place(mapping["size"])
                base.map(start - base.address, mapping["size"], self._fd, place)
        return outcome

    def cuMemUnmap(self, address, size):
        assert self.mappings[address]["size"] == size, "only what one call mapped can be unmapped, and all of it"
        del self.mappings[address]
        base = self._reservation(address, size)
        base.unmap(address - base.address, size)
        return self._outcome("cuMemUnmap")

    def cuMemsetD8Async(self, address, value, size, stream):
        assert stream == "stream"
        covered = self._overlapping(address, size)
        ends = ((max(start, address), min(start + self.mappings[start]["size"], address + size)) for start in covered)
        assert sum(end - start for start, end in ends) == size, "memset of addresses without memory"
        assert all(self.mappings[start]["access"] for start in covered), "memset without access"
        if (outcome := self._outcome("cuMemsetD8Async")) == OK:
            ctypes.memset(address, value, size)
        return outcome

    def _outcome(self, name):
        """Whether the call fails, as asked for."""
        assert getattr(self._thread, "context", None), f"{name} in a thread without a context"
        self.calls.append(name)
        if name not in self.fail:
            return OK
        after, error = self.fail[name]
        if after:
            self.fail[name] = (after - 1, error)
            return OK
        del self.fail[name]
        return (error,)

    def _place(self, size):
        """Where in the file there is room, filled with what nobody expects."""
        places = self._free_places.get(size)
        place = places.pop() if places else self._file_end
        self._file_end = max(self._file_end, place + size)
        os.ftruncate(self._fd, self._file_end)
        os.pwrite(self._fd, b"\xff" * size, place)
        return place

    def _reservation(self, address, size):
        starts = sorted(self.reservations)
        index = bisect_right(starts, address) - 1
        assert index >= 0, "not a reserved address"
        base = self.reservations[starts[index]]
        assert address + size <= base.address + base.size, "not a reserved address"
        return base

    def _overlapping(self, address, size):
        return [s for s, mapping in self.mappings.items() if s < address + size and s + mapping["size"] > address]
