"""Reserved address ranges, and pieces of files mapped into them: mmap(2) through ctypes, for Linux.

Python's own mmap module cannot map at a chosen address (MAP_FIXED). The numbers are those of x86-64 and arm64.
"""

import ctypes
import functools
import mmap
import os
import weakref
from typing import Any

PROT_NONE = 0
MAP_FIXED = 0x10
MAP_NORESERVE = 0x4000
UNUSED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
FAILED = ctypes.c_void_p(-1).value


@functools.cache
def libc() -> Any:
    """mmap and munmap of the C library. A call takes about a microsecond: too short to be worth leaving the GIL."""
    library = ctypes.PyDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64
    ]  # fmt: skip
    library.munmap.restype = ctypes.c_int
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


def map_memory(address: int | None, size: int, protection: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """mmap(2). Returns the address; raises `OSError`."""
    result: int | None = libc().mmap(address, size, protection, flags, fd, offset)
    if result is None or result == FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    return result


class AddressRange:
    """`size` bytes of reserved addresses; takes no memory, and touching a piece that is not mapped is a fault.

    Given back by `close`, or when nothing refers to it any more. `buffer` shows the range and keeps it alive.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.address = map_memory(None, size, PROT_NONE, UNUSED)
        self._release = weakref.finalize(self, libc().munmap, self.address, size)
        # At exit the system takes the memory back anyway, while threads may still be using it.
        self._release.atexit = False

    def map(self, offset: int, size: int, fd: int, file_offset: int) -> None:
        """Show `size` bytes of a file at `offset`, replacing what was there. Raises `OSError`."""
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        map_memory(self.address + offset, size, protection, mmap.MAP_SHARED | MAP_FIXED, fd, file_offset)

    def unmap(self, offset: int, size: int) -> None:
        """Make a piece a mere reservation again. Raises `OSError`."""
        map_memory(self.address + offset, size, PROT_NONE, UNUSED | MAP_FIXED)

    def buffer(self) -> Any:
        """The whole range as a ctypes array; making it touches nothing."""
        array = (ctypes.c_char * self.size).from_address(self.address)
        array.owner = self  # type: ignore[attr-defined]
        return array

    def close(self) -> None:
        """Give the addresses back; may be called again."""
        self._release()
