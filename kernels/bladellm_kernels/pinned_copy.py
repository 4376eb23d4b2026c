"""Copies between pinned host memory and a CUDA device, by the driver's functions.

`Tensor.copy_` has torch's allocator note until when each of them uses the host memory, which takes as long again as
queueing the copy; here that is left to the caller.
"""

from functools import cache

import torch
from torch import Tensor

from bladellm_kernels.cuda_kernel import DriverLibrary, driver_library

INVALID_CONTEXT = 201
"""CUresult, CUDA_ERROR_INVALID_CONTEXT: of a thread that has not used the device yet."""


def copy_to_device(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    """Queue a copy of all of a host tensor to the beginning of one on the device, both contiguous and of one type.

    Asynchronous where `source` is pinned: it must stay as it is until the copy is done. Raises ValueError for tensors
    that do not fit, RuntimeError with the driver's error.
    """
    _queue("cuMemcpyHtoDAsync_v2", target, source, stream)


def copy_from_device(target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    """The same of a tensor on the device to the beginning of one on the host, which is not to be read before."""
    _queue("cuMemcpyDtoHAsync_v2", target, source, stream)


def _queue(name: str, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
    size = source.nbytes
    if source.dtype != target.dtype or size > target.nbytes or not (source.is_contiguous() and target.is_contiguous()):
        raise ValueError(f"{source.dtype} {tuple(source.shape)} is not copied to {target.dtype} {tuple(target.shape)}")
    driver = _driver()
    if driver is None:
        with torch.cuda.stream(stream):
            target.view(-1)[: source.numel()].copy_(source.view(-1), non_blocking=True)
        return
    given = (target.data_ptr(), source.data_ptr(), size, stream.cuda_stream)
    status = getattr(driver.functions, name)(*given)
    if status == INVALID_CONTEXT:
        stream.query()  # makes torch's own context the thread's
        status = getattr(driver.functions, name)(*given)
    driver.check(name, status)


@cache
def _driver() -> DriverLibrary | None:
    """None where it is too old for other things that it is used for."""
    try:
        return driver_library()
    except OSError:
        return None
