"""Capturing work as CUDA graphs, and finding out what could not be captured."""

import contextlib
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")
Work = Callable[[], None]
Capture = Callable[[Work], Work]
"""Takes work over static tensors, and returns what repeats it on them."""
Rehearsal = Callable[[], contextlib.AbstractContextManager[None]]


class CudaCapture:
    """Captures work as graphs with one memory pool: at most one may be running at a time, all on one stream."""

    def __init__(self, device: torch.device, rehearsal: Rehearsal = contextlib.nullcontext) -> None:
        """rehearsal: in which work does only what compiles and loads all it needs."""
        self._device = device
        self._rehearsal = rehearsal
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, work: Work) -> Work:
        """Rehearse the work, capture it, and do it. Raises what CUDA or it raises."""
        with self._rehearsal():
            self._do(work)
        try:
            graph = self._capture(work)
        except RuntimeError:
            # The rehearsal has left out what cannot be done in a capture. Memory of one that failed stays taken.
            self._pool = torch.cuda.graph_pool_handle()
            self._do(work)
            graph = self._capture(work)
        # The first launch of a graph takes it to the device; that is not left to a request.
        self._do(graph.replay)
        return graph.replay

    def _do(self, work: Work) -> None:
        """Do work on the stream of captures, in order with the current one."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)

    def _capture(self, work: Work) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Other threads may map KV memory meanwhile, which the mode "global" would forbid.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                with no_waiting():
                    work()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """What would wait for the device raises `RuntimeError` before it does, which would spoil the capture."""
    with warnings.catch_warnings():
        # PyTorch calls the mode a prototype, each time.
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def capture_sizes(kind: str, sizes: Sequence[int], capture: Callable[[int], T], without: str) -> dict[int, T]:
    """Capture each of ascending sizes, the largest first: smaller ones fit into its memory. kind: of size, for the log.

    None at all, with a warning that names the operator and says `without`, where one of them cannot be captured.
    """
    graphs: dict[int, T] = {}
    try:
        for size in reversed(sizes):
            logger.info("caching graph of %s=%d", kind, size)
            graphs[size] = capture(size)
    except RuntimeError as error:
        logger.warning("%s: %s cannot be captured (%s)", without, culprit(error), error)
        return {}
    return graphs


def culprit(error: BaseException) -> str:
    """The operator or layer in which an error arose: the innermost function of ours, as `file.function`."""
    ours = ("bladellm_kernels", "layers", "models")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if PurePath(f.filename).parent.name in ours]
    return f"{PurePath(frames[-1].filename).stem}.{frames[-1].name}" if frames else "the step"
