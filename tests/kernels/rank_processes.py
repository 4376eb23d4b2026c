"""One process a rank, each calling the same function of a test module."""

import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import bladellm_kernels

from tests.kernels.interpreted import PREPARE
from tests.support.warm import run_code


def import_path() -> str:
    """Where a process finds the repository's modules."""
    own = [str(Path(__file__).parents[2]), str(Path(bladellm_kernels.__file__).parents[1])]
    return os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_forked_ranks(
    module: str, function: str, ranks: int, *arguments: int | str, interpreted: bool = False, seconds: float = 110.0
) -> None:
    """`run_ranks` for ranks without a GPU, which are forked from one process that has imported all they need."""
    call = (module, function, ranks, arguments, seconds)
    start = f"from tests.kernels.rank_processes import fork_ranks; fork_ranks{call}"
    environment = {"PYTHONPATH": import_path()} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    done = run_code((PREPARE if interpreted else "") + start, **environment)
    assert done.returncode == 0, done.stderr


def fork_ranks(module: str, function: str, ranks: int, arguments: tuple[int | str, ...], seconds: float) -> None:
    """Until all ranks have ended, in time; the first that fails ends the others, which may wait for it."""
    work = getattr(importlib.import_module(module), function)
    left = set()
    for rank in range(ranks):
        process = os.fork()
        if process == 0:
            signal.alarm(int(seconds))
            end_rank(lambda rank=rank: work(rank, ranks, *arguments))
        left.add(process)
    while left:
        process, status = os.wait()
        left.remove(process)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank ended with exit code {os.waitstatus_to_exitcode(status)}")


def end_rank(work: Callable[[], None]) -> NoReturn:
    """Do it and end, without what the process that was forked would do at its end."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def run_ranks(module: str, function: str, ranks: int, *arguments: int | str, seconds: float = 110.0) -> None:
    """Call `function(rank, ranks, *arguments)` on each; all must end well in time."""
    environment = {**os.environ, "PYTHONPATH": import_path()}
    start = f"from {module} import {function}; {function}"
    with TemporaryDirectory() as folder:
        logs = [Path(folder) / str(rank) for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", f"{start}({', '.join(map(repr, (rank, ranks, *arguments)))})"],
                env=environment, stderr=logs[rank].open("w"),
            )
            for rank in range(ranks)
        ]  # fmt: skip
        try:
            wait(processes, logs, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wait(processes: list[subprocess.Popen], logs: list[Path], until: float) -> None:
    """Until all have ended; the first that fails ends the wait for the others, which may wait for it."""
    while None in (codes := [process.poll() for process in processes]):
        failed = [log.read_text() for code, log in zip(codes, logs, strict=True) if code]
        assert not failed, failed[0]
        assert time.monotonic() < until, [log.read_text() for log in logs]
        time.sleep(0.05)
    assert not any(codes), [log.read_text() for log in logs]
