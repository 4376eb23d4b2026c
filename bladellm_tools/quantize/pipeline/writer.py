"""A thread that writes the last layer while the next one is worked on: one piece of work at a time, in order."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

Tensors = dict[str, torch.Tensor]


class Writer:
    """A context; left without an error it has finished, left with one it finishes what it has begun.

    What the work raises, the next `put` or the end of the context raises.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "write")
        self._pending: Future[None] | None = None

    def put(self, work: Callable[[], None]) -> None:
        """Have `work` done as soon as what was put before is; waits until that is the case."""
        self.wait()
        self._pending = self._pool.submit(work)

    def wait(self) -> None:
        """Return once everything is written."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(wait=True)


class HostCopy:
    """Tensors on their way to the CPU: made on the thread that computes them, `finish` called on the one that writes.

    On CUDA the copies run beside the computation, on a stream of their own.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._ready: dict[torch.device, torch.cuda.Event] = {}
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            self._ready[device] = torch.cuda.current_stream(device).record_event()

    def finish(self) -> Tensors:
        """The tensors on the CPU."""
        if not self._ready:
            return self._tensors
        copies = {}
        streams = {device: torch.cuda.Stream(device) for device in self._ready}
        for name, tensor in self._tensors.items():
            if not tensor.is_cuda:
                copies[name] = tensor
                continue
            stream = streams[tensor.device]
            stream.wait_event(self._ready[tensor.device])
            with torch.cuda.stream(stream):
                copies[name] = tensor.cpu()
        self._tensors = {}
        return copies
