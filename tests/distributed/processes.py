"""Ranks as processes that meet over gloo."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch

from bladellm_runtime.distributed.communicator import connect, disconnect

WAIT_S = 60.0


def run_processes(size: int, folder: Path, work: Callable[..., object], *arguments) -> list:
    """What `work(rank, *arguments)`, a function of a module, saves on every rank: each returns what `torch.save` can
    write and `torch.load` read without objects. Forked, since importing torch takes each seconds of a core."""
    context = multiprocessing.get_context("fork")
    meeting = folder / "meeting"
    processes = [
        context.Process(target=_run, args=(str(meeting), rank, size, folder, work, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(WAIT_S)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0] * size
    return [torch.load(folder / f"result-{rank}.pt", weights_only=True) for rank in range(size)]


def _run(meeting: str, rank: int, size: int, folder: Path, work, arguments) -> None:
    torch.set_num_threads(1)
    connect(f"file://{meeting}", rank, size, torch.device("cpu"), timeout_s=WAIT_S)
    torch.save(work(rank, *arguments), folder / f"result-{rank}.pt")
    disconnect()
