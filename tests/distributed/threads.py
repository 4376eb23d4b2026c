"""Ranks as threads of one process: a communicator that really adds up and gathers, without sockets."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
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
    """Computes what `AllReduce` says, and refuses what it refuses. joined: (operation, rows) of every call.

    overlap_rows: fewest rows of a sum that is taken in parts; 0: none is.
    """

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size
        self.joined: list[tuple[str, int]] = []
        self.overlap_rows = 0
        self._started: list[ThreadSum] = []

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

    def overlaps(self, rows: int) -> bool:
        return 0 < self.overlap_rows <= rows

    def start_sum(self, y: torch.Tensor, first: int) -> "ThreadSum":
        assert y.ndim == 2
        assert y.is_contiguous()
        assert first == sum(len(each.y) for each in self._started), "rows of a layer before are under way"
        self.joined.append(("start_sum", len(y)))
        self._started.append(ThreadSum(self, y, all_reduce_reference(self._exchange(y.clone())), y.clone()))
        return self._started[-1]

    def finish(self, started: "ThreadSum") -> None:
        """Sums are used in the order in which they were started, and the last of a layer ends it."""
        self.joined.append(("add_norm of sum", len(started.y)))
        assert started in self._started
        started.used = True
        assert [each.used for each in self._started] == sorted((each.used for each in self._started), reverse=True)
        if all(each.used for each in self._started):
            self._started.clear()

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
        assert not self._started, f"{name} while sums are under way"
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


@dataclass(eq=False)
class ThreadSum:
    """Rows of one rank, which may not be written to until their sum is used; a copy of them says whether they were."""

    group: ThreadCommunicator
    y: torch.Tensor
    sum: torch.Tensor
    before: torch.Tensor
    used: bool = False

    def add_norm(self, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        assert torch.equal(self.y, self.before), "rows were written to while they were added up"
        self.group.finish(self)
        self.y.fill_(torch.nan)
        residual.copy_(self.sum + residual.float())
        out.copy_(rms_norm_reference(residual, weight, eps))


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
