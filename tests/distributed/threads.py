"""Ranks as threads of one process: a communicator that really adds up and gathers, without sockets."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

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
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        parts = self._exchange(x.clone())
        return x.copy_(torch.stack(parts).sum(0))

    def all_gather_last(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x.clone()), dim=-1)

    def barrier(self) -> None:
        self._exchange(None)

    def min_int(self, value: int) -> int:
        return min(self._exchange(value))

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
