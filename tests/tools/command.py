"""Run the commands as a user does: in processes of their own, with pipes or on a terminal."""

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = {
    "blade_llm": "main",
    "blade_llm_server": "server",
    "blade_llm_quantize": "quantize",
    "blade_llm_split": "split",
    "blade_llm_check": "check",
    "blade_llm_bench": "bench",
}


def command(program: str) -> list[str]:
    """The command line of a console script, whether or not it is installed."""
    function = ENTRY_POINTS[program]
    code = f"import sys; sys.argv[0] = {program!r}; from bladellm_tools.cli import {function}; {function}()"
    return [sys.executable, "-c", code]


def run(program: str, *arguments: str, **options: object) -> "subprocess.CompletedProcess[str]":
    """Run to the end, with standard output and error in pipes."""
    settings: dict[str, object] = {"capture_output": True, "text": True, "cwd": ROOT, "timeout": 60, **options}
    return subprocess.run([*command(program), *arguments], check=False, **settings)


def run_on_terminal(program: str, *arguments: str, columns: int = 80, **environment: str) -> str:
    """What a terminal of this width shows, escape sequences included."""
    master, slave = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color", **environment}
    process = subprocess.Popen(
        [*command(program), *arguments], stdout=slave, stderr=slave, stdin=slave, env=env, cwd=ROOT
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not part:
            break
        shown += part
    os.close(master)
    process.wait(60)
    return shown.decode().replace("\r\n", "\n")


def wait_for_library(pid: int, name: str, seconds: float = 30.0) -> None:
    """Return once the process has loaded a library: before its own code runs, Python itself answers an interrupt."""
    deadline = time.monotonic() + seconds
    while name not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < deadline, f"{name} was not loaded within {seconds} s"
        time.sleep(0.005)
