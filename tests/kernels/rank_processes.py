"""One process a rank, each calling the same function of a test module."""

import os
import subprocess
import sys
from pathlib import Path

import bladellm_kernels

MEND = "from tests.kernels.decode_support import mend; mend(); "


def run_ranks(
    module: str, function: str, ranks: int, *arguments: int | str, interpreted: bool = False, seconds: float = 110.0
) -> None:
    """Call `function(rank, ranks, *arguments)` on each; all must end well in time. interpreted: Triton's kernels."""
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(bladellm_kernels.__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if interpreted else {})
    start = f"{MEND if interpreted else ''}from {module} import {function}; {function}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"{start}({', '.join(map(repr, (rank, ranks, *arguments)))})"],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        for process in processes:
            _, errors = process.communicate(timeout=seconds)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.wait()
