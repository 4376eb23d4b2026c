"""Tensors over addresses that have no memory yet, through DLPack.

torch takes a DLPack tensor's address as it is, while its other ways in ask the device about it.
The structure is that of DLPack before 1.0, which torch reads in all versions.
"""

import ctypes
import functools
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

CPU, CUDA = 1, 2
UNSIGNED = 1
CAPSULE_NAME = b"dltensor"


class ManagedTensor(ctypes.Structure):
    """DLManagedTensor of a tensor with one dimension, and behind it the shape it points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("size", ctypes.c_int64),
    )


def bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """`size` bytes from `address` on as a uint8 tensor [size], without touching them.

    The tensor does not own them: nothing happens to them when it goes away, and they may go away before it.
    """
    place = _libc().malloc(ctypes.sizeof(ManagedTensor))
    if not place:
        raise MemoryError("no memory for a DLPack tensor")
    managed = ManagedTensor.from_address(place)
    managed.data, managed.byte_offset = address, 0
    managed.device_type = CUDA if device.type == "cuda" else CPU
    managed.device_id = device.index or 0
    managed.ndim, managed.size = 1, size
    managed.dtype_code, managed.dtype_bits, managed.dtype_lanes = UNSIGNED, 8, 1
    managed.shape, managed.strides, managed.manager_ctx = place + ManagedTensor.size.offset, None, None
    # The C library's own free: a deleter written in Python could be called when Python is no more.
    managed.deleter = ctypes.cast(_libc().free, ctypes.c_void_p)
    return from_dlpack(_new_capsule()(place, CAPSULE_NAME, None))


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = [ctypes.c_size_t]
    return library


@functools.cache
def _new_capsule() -> Any:
    """PyCapsule_New; torch takes what the capsule points to and frees that itself."""
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return prototype(("PyCapsule_New", ctypes.pythonapi))
