"""Python processes that find torch imported already: they are forked from one that has.

For tests whose code must run in a process of its own, because it changes what no later test may see, or is told by the
environment what it is to be when it is imported. Importing torch would take longer than most of that code.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMPORTED = ("torch", "numpy", "pytest", "hypothesis")
"""Nothing of the repository, and nothing that reads the environment of a test: not triton."""


def run_code(code: str, *arguments: object, cwd: Path = ROOT, **environment: str) -> "subprocess.CompletedProcess[str]":
    """What `python -c code arguments` does, with these variables beside the test's own."""
    return _forker().run({"code": code}, ["-c", *map(str, arguments)], cwd, environment)


def run_script(
    script: Path, *arguments: object, cwd: Path = ROOT, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """What `python script arguments` does, with these variables beside the test's own."""
    return _forker().run({"script": str(script)}, [str(script), *map(str, arguments)], cwd, environment)


class Forker:
    """The process that forks: it starts with its first job, and ends with its standard input."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        atexit.register(self.end)

    def run(
        self, what: dict[str, str], argv: list[str], cwd: Path, environment: dict[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        with tempfile.TemporaryDirectory() as folder:
            job = {"argv": argv, "cwd": str(cwd), "environment": {**os.environ, **environment}, "folder": folder}
            code = self._ask(what | job)
            out, err = ((Path(folder) / name).read_text() for name in ("out", "err"))
        return subprocess.CompletedProcess(argv, code, out, err)

    def end(self) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=10.0)
            except subprocess.TimeoutExpired:  # whoever was forked from this process may have its input open
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()

    def _ask(self, job: dict[str, Any]) -> int:
        """The exit code of a job; a test that is interrupted takes the job with it."""
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())
        except BaseException:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            raise

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


_forker = cache(Forker)
"""The only one of a test process, made when it is needed first."""


def serve() -> dict[str, Any]:
    """Fork for every job, and tell its exit code; returns in the processes forked, with the job."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a forked process would copy the pages of all these objects
    while line := sys.stdin.readline():
        process = os.fork()
        if process == 0:
            return dict(json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
    sys.exit()


def become(job: dict[str, Any]) -> None:
    """Take the job's environment, folder and arguments, and write to its files."""
    for number, name, mode in ((0, os.devnull, os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        file = os.open(os.path.join(job["folder"], name), mode | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - closed with the process
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.argv = job["argv"]
    first = [str(Path(job["script"]).parent)] if "script" in job else [""]
    sys.path[:1] = [*first, *filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))]


def run(job: dict[str, Any]) -> None:
    if "script" in job:
        runpy.run_path(job["script"], run_name="__main__")
    else:
        exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})


def exit_code(job: dict[str, Any]) -> int:
    """Run a job, and tell what ended it as Python does."""
    try:
        run(job)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    """Forked processes end without taking torch apart, which would last longer than many a job."""
    job = serve()
    become(job)
    code = exit_code(job)
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
