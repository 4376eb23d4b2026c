"""One process a rank, each calling the same function of a test module."""

import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import bladellm_kernels

MEND = "from tests.kernels.interpreted import take_scalars_as_bounds as mend; mend(); "


def run_ranks(
    module: str, function: str, ranks: int, *arguments: int | str, interpreted: bool = False, seconds: float = 110.0
) -> None:
    """Call `function(rank, ranks, *arguments)` on each; all must end well in time. interpreted: Triton's kernels."""
    own = [str(Path(__file__).parents[2]), str(Path(bladellm_kernels.__file__).parents[1])]
    path = os.pathsep.join([*own, *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    start = f"{MEND if interpreted else ''}from {module} import {function}; {function}"
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
