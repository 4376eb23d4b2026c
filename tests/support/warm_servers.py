"""Server processes that find the modules of a server imported already: they are forked from one that has them.

A server takes half a second of a processor to import what it needs, and the tests start some sixty.
"""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).parents[2]
IMPORTED = ("tests.support.live", "bladellm_runtime.server.lifecycle", "bladellm_runtime.server.routes")
MAX_JOB_BYTES = 2**16
NUMBER = struct.Struct("<i")


class WarmServer:
    """A server process, with what `subprocess.Popen` has for one. launch: its argument; log: its standard error."""

    def __init__(self, launch: str, log: TextIO, environment: dict[str, str]) -> None:
        told, tell = os.pipe()
        self._numbers, count = os.pipe()
        self._code: int | None = None
        self.stdout = open(told)  # noqa: SIM115 - closed by who started the server
        try:
            job = {"launch": launch, "environment": environment}
            _forker().send(json.dumps(job).encode(), [tell, log.fileno(), count])
        finally:
            os.close(tell)
            os.close(count)
        self.pid = self._read()

    def poll(self) -> int | None:
        """The exit code, once there is one."""
        if self._code is None and select.select([self._numbers], [], [], 0.0)[0]:
            self._end()
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            if not select.select([self._numbers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a server", timeout or 0.0)
            self._end()
        assert self._code is not None
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _end(self) -> None:
        self._code = self._read()
        os.close(self._numbers)

    def _read(self) -> int:
        return int(NUMBER.unpack(os.read(self._numbers, NUMBER.size))[0])


class Forker:
    """The process that forks: it starts with the first server, and ends with the connection to it."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_servers", str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        atexit.register(self.end)

    def send(self, job: bytes, files: list[int]) -> None:
        """Have a server forked whose output, log and numbers (process, then exit code) are `files`."""
        assert len(job) < MAX_JOB_BYTES
        socket.send_fds(self._connection, [job], files)

    def end(self) -> None:
        self._connection.shutdown(socket.SHUT_RDWR)  # whoever else was forked from here may have it open
        self._connection.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()


_forker = cache(Forker)
"""The only one of a test process, made when it is needed first."""


def forked_job(connection: socket.socket) -> tuple[str, dict[str, str]]:
    """Fork for every job; returns in the processes forked, with the job: the argument and the environment."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for servers
    while True:
        job, files, _, _ = socket.recv_fds(connection, MAX_JOB_BYTES, 3)
        if not job:
            sys.exit()
        if os.fork() == 0:
            connection.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            become_server(*files)
            fields = json.loads(job)
            return fields["launch"], fields["environment"]
        for file in files:
            os.close(file)


def become_server(out: int, log: int, numbers: int) -> None:
    """Fork once more; returns in the new process, while this one waits for it and tells its numbers."""
    process = os.fork()
    if process:
        os.close(out)
        os.close(log)
        os.write(numbers, NUMBER.pack(process))
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        with suppress(BrokenPipeError):  # who asked may be gone
            os.write(numbers, NUMBER.pack(code))
        os._exit(0)
    os.dup2(out, 1)
    os.dup2(log, 2)
    for file in (out, log, numbers):
        os.close(file)


def main() -> int:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy the pages of all these objects
    launch, environment = forked_job(connection)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # as the environment has it
    sys.argv = ["tests.support.live", launch]
    return int(importlib.import_module("tests.support.live").main())


if __name__ == "__main__":
    sys.exit(main())
