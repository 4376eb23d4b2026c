"""The ranks of a host that is not the first: started together, ended together. No server, no engine, no torch."""

import logging
import signal
import subprocess
import threading
from pathlib import Path

import psutil

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.ranks.launch import meeting_of, read_secret, start_rank
from bladellm_runtime.ranks.watchdog import SILENT_SECONDS
from bladellm_runtime.wire.signals import STOP_SIGNALS

POLL_SECONDS = 0.2
EXIT_SECONDS = 3.0
"""How long the others may take once one rank has ended: all of them hear of it by themselves."""
HALTED_SECONDS = SILENT_SECONDS + 1.5
"""How long a rank may be halted: rank 0 is to notice first, which says what happened."""

logger = logging.getLogger(__name__)


def run_node(args: EngineArgs, folder: Path) -> int:
    """Run this host's ranks of the model in `folder` until the group ends; returns the exit code.

    0 after rank 0 closed the group, 130 after a signal, which ends the whole group. Raises `UserError` when they cannot
    be started or end otherwise.
    """
    read_secret(args)
    meeting = meeting_of(args, folder)
    stop = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in args.local_ranks:
            processes.append(start_rank(rank, meeting, args))
        ranks = ", ".join(f"rank {rank}" for rank in args.local_ranks)
        logger.info("%s: joining rank 0 at %s", ranks, args.dist_init_addr)
        halted = 0.0
        while not stop.wait(POLL_SECONDS) and all(process.poll() is None for process in processes):
            # Rank 0 knows as well, but cannot end a process of this host.
            halted = halted + POLL_SECONDS if any(map(_is_halted, processes)) else 0.0
            if halted > HALTED_SECONDS:
                raise UserError("a rank of this host is halted; its group has ended")
        return 130 if stop.is_set() else _end_of(processes, stop)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _is_halted(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a process does not run at all, by a signal or a debugger."""
    try:
        return psutil.Process(process.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.NoSuchProcess:
        return False


def _end_of(processes: list[subprocess.Popen[bytes]], stop: threading.Event) -> int:
    """Wait for all once one has ended; the exit code for them."""
    waited = 0.0
    while waited < EXIT_SECONDS and any(process.poll() is None for process in processes):
        stop.wait(POLL_SECONDS)
        waited += POLL_SECONDS
    if all(process.poll() == 0 for process in processes):
        return 0
    raise UserError("the ranks of this host ended with their group; rank 0's host says why")
