"""Ranks as threads of one process: a communicator that really adds up and gathers, without sockets."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from bladellm_kernels.all_reduce import all_reduce_reference
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.rms_norm import rms_norm_reference

T = TypeVar("T")
WAIT_S = 30.0


class Meeting:
    """Where the threads of a group put their values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.values: list = [None] * size
        self.calls = [0] * size


class ThreadCommunicator:
    """Computes what `AllReduce` says, and refuses what it refuses. joined: (operation, rows) of every call."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.joined: list[tuple[str, int]] = []

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        return x.copy_(all_reduce_reference(self._join("all_reduce", x)))

    def add_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._add("add_norm", y, residual, weight)
        return rms_norm_reference(residual, weight, eps).to(y.dtype), residual

    def add_delayed_norm(
        self, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, DelayedNorm]:
        """The squares in two parts, as a kernel may leave them."""
        self._add("add_delayed_norm", y, residual, weight)
        squares = [half.float().square().sum(1) for half in residual.tensor_split(2, dim=1)]
        return residual, DelayedNorm(residual * weight, torch.stack(squares, 1), eps)

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._join("all_gather_last", x), dim=-1)

    def barrier(self) -> None:
        self._exchange(None)

    def min_int(self, value: int) -> int:
        return min(self._exchange(value))

    def _add(self, name: str, y: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
        """Sums in float32, in the order of the ranks, rounded once; then y is anything."""
        assert y.ndim == 2
        assert y.shape == residual.shape
        assert all(each.is_contiguous() and each.dtype == y.dtype for each in (y, residual, weight))
        stream = self._exchange(residual.clone())[0]
        assert torch.equal(stream, residual), "ranks have different streams"
        residual.copy_(all_reduce_reference(self._join(name, y)) + residual.float())
        y.fill_(torch.nan)

    def _join(self, name: str, x: torch.Tensor) -> list[torch.Tensor]:
        self.joined.append((name, len(x)))
        return self._exchange(x.clone())

    def _exchange(self, value) -> list:
        meeting = self._meeting
        meeting.calls[self.rank] += 1
        meeting.values[self.rank] = value
        meeting.barrier.wait(WAIT_S)
        values = list(meeting.values)
        meeting.barrier.wait(WAIT_S)
        return values


def run_ranks(size: int, work: Callable[[ThreadCommunicator], T]) -> list[T]:
    """What `work` returns on every rank, each in a thread of its own. All must have met as often."""
    meeting = Meeting(size)
    results: list = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadCommunicator(meeting, rank))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    for error in broken or errors:
        raise error
    assert len(set(meeting.calls)) == 1, meeting.calls
    return results
