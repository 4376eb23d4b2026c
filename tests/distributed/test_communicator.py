"""What ranks do together, in real processes."""

import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from bladellm_runtime.distributed import communicator
from bladellm_runtime.distributed.communicator import connect, disconnect, make_communicator
from bladellm_runtime.errors import ConfigError
from tests.distributed.processes import run_processes

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers that all types hold, different on every rank."""
    return (torch.arange(15) * (rank + 2) % 13).view(3, 5).to(dtype)


def collectives(rank: int) -> dict:
    """Of three ranks, in a group of all and in groups of {0, 2} and {1}."""
    whole = make_communicator([[0, 1, 2]])
    pair = make_communicator([[0, 2], [1]])
    assert whole is not None
    whole.barrier()
    found: dict = {"places": (whole.rank, whole.size), "least": whole.min_int(2**40 - rank)}
    for name, group in (("whole", whole), ("pair", pair)):
        if group is not None:
            found[name] = [group.rank, group.size]
            found[f"{name} sums"] = [group.all_reduce(inputs(rank, dtype)) for dtype in DTYPES]
            found[f"{name} rows"] = [group.all_gather_last(inputs(rank, dtype)) for dtype in DTYPES]
            found[f"{name} columns"] = group.all_gather_last(inputs(rank, DTYPES[0]).t())
    return found


def test_sums_and_gathered_parts(tmp_path):
    results = run_processes(3, tmp_path, collectives)
    assert [found["places"] for found in results] == [(0, 3), (1, 3), (2, 3)]
    assert [found["least"] for found in results] == [2**40 - 2] * 3
    assert [found.get("pair") for found in results] == [[0, 2], None, [1, 2]]
    for name, ranks in (("whole", [0, 1, 2]), ("pair", [0, 2])):
        for rank in ranks:
            for number, dtype in enumerate(DTYPES):
                parts = [inputs(one, dtype) for one in ranks]
                assert torch.equal(results[rank][f"{name} sums"][number], torch.stack(parts).sum(0))
                assert torch.equal(results[rank][f"{name} rows"][number], torch.cat(parts, 1))
            columns = torch.cat([inputs(one, DTYPES[0]).t() for one in ranks], 1)
            assert torch.equal(results[rank][f"{name} columns"], columns)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError, match=r"^rank 1 cannot meet the other 1 at tcp://127"):
        connect(address, 1, 2, torch.device("cpu"), timeout_s=1.0)


def test_a_port_that_is_taken_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"already in use.*; --dist_init_addr must be followed by two"):
            connect(address, 0, 2, torch.device("cpu"), timeout_s=1.0)


def test_leaving_gpus_waits_for_nobody(monkeypatch):
    """NCCL's end hangs while somebody holds a graph with its kernels: this process goes on, and waits when it ends."""
    aborted, let_go = threading.Event(), threading.Event()
    at_exit: list[tuple[Callable[[float], None], float]] = []

    def hang() -> None:
        aborted.set()
        let_go.wait(60.0)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: communicator.BACKENDS["cuda"])
    monkeypatch.setattr(dist, "destroy_process_group", lambda: pytest.fail("waits for the other ranks"))
    monkeypatch.setattr(communicator, "abort", hang)
    monkeypatch.setattr(communicator, "LEAVE_SECONDS", 0.05)
    monkeypatch.setattr(communicator.atexit, "register", lambda *call: at_exit.append(call))
    started = time.monotonic()
    disconnect(ending=True)
    assert not aborted.is_set()
    assert not at_exit
    disconnect()
    ((join, seconds),) = at_exit
    let_go.set()
    join(seconds)
    assert aborted.is_set()
    assert not any(thread.name == "leave-ranks" for thread in threading.enumerate())
    assert time.monotonic() - started < 30.0
