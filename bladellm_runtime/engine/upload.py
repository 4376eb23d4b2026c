"""Send small host arrays to the device in one asynchronous copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGN = 16
"""Bytes each array starts at a multiple of: Triton compiles kernels apart for addresses that are no multiples of 16."""


def upload(arrays: Sequence[Array], device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """Returns one device tensor an array, same shape and dtype, and the pinned buffer the copy reads (CUDA only).

    The copy is queued on the current stream, never waited for. The buffer is fresh, and must be kept until the copy
    has run. On the CPU the tensors share the arrays' memory.
    """
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays], None
    pinned = torch.empty(packed_bytes(arrays), dtype=torch.uint8, pin_memory=True)
    pack(arrays, pinned)
    return unpack(pinned.to(device, non_blocking=True), arrays), pinned


def packed_bytes(arrays: Sequence[Array]) -> int:
    """Bytes that `pack` fills."""
    return sum(_padded(array) for array in arrays)


def pack(arrays: Sequence[Array], buffer: Tensor) -> None:
    """Write the arrays one after the other into a uint8 host tensor."""
    host, start = buffer.numpy(), 0
    for array in arrays:
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array)


def unpack(buffer: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Views of a packed buffer, one like each array."""
    views, start = [], 0
    for array in arrays:
        # torch names the type of an array without data: nothing is copied here.
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        views.append(buffer[start : start + array.nbytes].view(dtype).view(array.shape))
        start += _padded(array)
    return views


def _padded(array: Array) -> int:
    return -(-array.nbytes // _ALIGN) * _ALIGN
