"""Send small host arrays to the device in one asynchronous copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGN = 8


def upload(arrays: Sequence[Array], device: torch.device) -> tuple[list[Tensor], Tensor | None]:
    """Returns one device tensor an array, same shape and dtype, and the pinned buffer the copy reads (CUDA only).

    The copy is queued on the current stream, never waited for. The buffer is fresh, and must be kept until the copy
    has run. On the CPU the tensors share the arrays' memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays], None
    ends = np.cumsum([-(-array.nbytes // _ALIGN) * _ALIGN for array in arrays])
    pinned = torch.empty(int(ends[-1]) if arrays else 0, dtype=torch.uint8, pin_memory=True)
    host = pinned.numpy()
    starts = [0, *ends[:-1].tolist()]
    for start, array in zip(starts, arrays, strict=False):
        host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    sent = pinned.to(device, non_blocking=True)
    return [_view(sent, start, array) for start, array in zip(starts, arrays, strict=False)], pinned


def _view(sent: Tensor, start: int, array: Array) -> Tensor:
    # torch names the type of an array without data: nothing is copied here.
    dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
    return sent[start : start + array.nbytes].view(dtype).view(array.shape)
