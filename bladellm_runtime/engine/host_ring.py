"""`HostRing`: host buffers for what steps send to the device and read back, made once and used in turn."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class Leading:
    """The first rows of a tensor: for as many as the last time the same view, since torch takes microseconds to make
    one."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = self._view = tensor
        self._count = len(tensor)

    def __call__(self, count: int) -> torch.Tensor:
        if count != self._count:
            self._view, self._count = self._tensor[:count], count
        return self._view


class HostBuffer:
    """int64 host memory, pinned for a CUDA device, as its first `numbers`; `array` is the same memory for numpy."""

    def __init__(self, length: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        tensor = torch.zeros(length, dtype=torch.int64, pin_memory=cuda)
        self.numbers = Leading(tensor)
        self.array: NDArray[np.int64] = tensor.numpy()
        self.copied: Any = torch.cuda.Event() if cuda else None

    def mark(self, stream: torch.cuda.Stream | None = None) -> None:
        """Note that the copy queued last on a stream, the current one where None, uses this buffer until it is done."""
        if self.copied is not None:
            self.copied.record(stream)

    def wait(self) -> None:
        """Return when that copy is done."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()


class HostRing:
    """As many buffers as steps are in flight, so that the next one is free when its turn comes again."""

    def __init__(self, length: int, device: torch.device, in_flight: int) -> None:
        """in_flight: steps between a launch and the reading of its result, at most."""
        self._buffers = [HostBuffer(length, device) for _ in range(in_flight)]
        self._turn = 0

    def next(self) -> HostBuffer:
        """The buffer whose turn it is, once its last copy is done."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer.wait()
        return buffer
