"""`HostRing`: host buffers for what steps send to the device and read back, made once and used in turn."""

from typing import Any

import numpy as np
import torch
from bladellm_kernels.pinned_copy import copy_from_device, copy_to_device
from numpy.typing import NDArray

from bladellm_runtime.engine.current_stream import CurrentStream


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

    def __init__(self, length: int, stream: CurrentStream | None) -> None:
        """stream: of a CUDA device, None for a CPU."""
        tensor = torch.zeros(length, dtype=torch.int64, pin_memory=stream is not None)
        self.numbers = Leading(tensor)
        self.array: NDArray[np.int64] = tensor.numpy()
        self._stream = stream
        self.copied: Any = None if stream is None else torch.cuda.Event()
        """Of the copy queued last, which uses this buffer until then; None on a CPU."""

    def send(self, target: torch.Tensor, count: int) -> None:
        """Queue a copy of the first numbers to the beginning of an int64 array, on the current stream."""
        if self._stream is None:
            target[:count].copy_(self.numbers(count))
            return
        stream = self._stream()
        copy_to_device(target, self.numbers(count), stream)
        self.copied.record(stream)

    def receive(self, source: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """Queue a copy of an int64 array on a stream, None on a CPU. Returns the numbers that it comes to."""
        numbers = self.numbers(len(source))
        if stream is None:
            return numbers.copy_(source)
        copy_from_device(numbers, source, stream)
        self.copied.record(stream)
        return numbers

    def wait(self) -> None:
        """Return when the copy queued last is done."""
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()


class HostRing:
    """As many buffers as steps are in flight, so that the next one is free when its turn comes again."""

    def __init__(self, length: int, device: torch.device, in_flight: int) -> None:
        """in_flight: steps between a launch and the reading of its result, at most."""
        stream = CurrentStream(device) if device.type == "cuda" else None
        self._buffers = [HostBuffer(length, stream) for _ in range(in_flight)]
        self._turn = 0

    def next(self) -> HostBuffer:
        """The buffer whose turn it is, once its last copy is done."""
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        buffer.wait()
        return buffer
