"""From files to a device without the model passing through host memory.

Several threads read pieces of tensors into a ring of pinned buffers; each buffer is copied on by the device while the
next ones fill. Host memory is that of the ring, whatever the size of the model.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import torch

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.ranges import FileRange

READERS = 8
"""Threads that read: one copies 2-4 GB/s out of the page cache, and a PCIe link takes 25-50."""
BUFFERS = 16
PIECE_BYTES = 16 * 2**20


class StagingBuffer:
    """Pinned memory that is filled from a file and then copied to a device, on the stream that all buffers share."""

    def __init__(self, size: int, stream: torch.cuda.Stream | None) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=stream is not None)
        self._stream = stream
        self._copied = None if stream is None else torch.cuda.Event()

    def read(self, descriptor: int, start: int, size: int) -> int:
        """Fill the first `size` bytes, once the last copy has left them; returns how many the file had."""
        if self._copied is not None:
            self._copied.synchronize()
        view = self._memory.numpy().data
        filled = 0
        while filled < size:
            count = os.preadv(descriptor, [view[filled:size]], start + filled)
            if count == 0:
                break
            filled += count
        return filled

    def copy_to(self, target: torch.Tensor, dtype: torch.dtype, allocated: torch.cuda.Event | None) -> None:
        """Start to copy as many numbers of `dtype` as `target` [n] has, cast to its type, after `allocated`."""
        numbers = self._memory[: target.numel() * dtype.itemsize].view(dtype)
        if self._stream is None or self._copied is None or allocated is None:
            target.copy_(numbers)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(allocated)
            # Cast on the device: a copy between types would be cast by the CPU, into memory that is not pinned.
            target.copy_(numbers.to(target.device, non_blocking=True) if dtype != target.dtype else numbers, True)
            self._copied.record()


class TensorStream:
    """Fills tensors of one device from ranges of files, many at a time. A context manager: leaving it drops what has
    not been read."""

    def __init__(self, device: torch.device, readers: int = READERS, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = device
        self._piece_bytes = piece_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ring: SimpleQueue[StagingBuffer] = SimpleQueue()
        for _ in range(max(BUFFERS, readers)):
            self._ring.put(StagingBuffer(piece_bytes, self._stream))
        self._readers = ThreadPoolExecutor(readers, "weights")
        self._files: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
        for descriptor in self._files.values():
            os.close(descriptor)

    def fill(self, target: torch.Tensor, source: FileRange) -> "list[Future[None]]":
        """Start to fill a contiguous tensor with a range of as many numbers, cast to its type.

        Returns what `wait` takes. Raises `CheckpointError` for a file that cannot be opened.
        """
        allocated = None
        if self._stream is not None:  # the tensor's memory may be in use by kernels launched before
            allocated = torch.cuda.current_stream(self._device).record_event()
        descriptor = self._open(source.file)
        count = self._piece_bytes // source.dtype.itemsize
        return [
            self._readers.submit(self._move, piece, source, first * source.dtype.itemsize, descriptor, allocated)
            for first, piece in zip(range(0, target.numel(), count), target.detach().view(-1).split(count), strict=True)
        ]

    def wait(self, pieces: "list[Future[None]]") -> None:
        """Return when the pieces are on their way; what the current stream does next sees them filled.

        Raises `CheckpointError` for a file that could not be read.
        """
        for piece in pieces:
            piece.result()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _move(
        self,
        target: torch.Tensor,
        source: FileRange,
        offset: int,
        descriptor: int,
        allocated: torch.cuda.Event | None,
    ) -> None:
        buffer, size = self._ring.get(), target.numel() * source.dtype.itemsize
        try:
            if buffer.read(descriptor, source.start + offset, size) < size:
                raise CheckpointError(f"{source.file}: {source.key} cannot be read: the file ends before it does")
            buffer.copy_to(target, source.dtype, allocated)
        except OSError as error:
            raise CheckpointError(f"{source.file}: {source.key} cannot be read: {error.strerror}") from error
        finally:
            self._ring.put(buffer)

    def _open(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        return self._files[path]
