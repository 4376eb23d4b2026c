"""Front ends without a server around them, and while a server starts."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from bladellm_runtime.server.front_ends import FrontEnds
from tests.support.live import ROOT, LiveServer, until

STALLED_ENGINE = [sys.executable, "-c", "import sys; sys.stdin.read()"]


@contextmanager
def loading_server(frontend_processes: int) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A server that waits for its model for ever, and its processes, all of them there; killed behind."""
    server = LiveServer(STALLED_ENGINE, frontend_processes=frontend_processes)
    command = [sys.executable, "-m", "tests.support.live", server.launch]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            parent = psutil.Process(process.pid)
            yield process, until(lambda: len(found := parent.children()) == frontend_processes and found, 10)
        finally:
            process.kill()


def keep_one_that_served(several: FrontEnds) -> "asyncio.Task[None]":
    """The task that starts front end 1 again whenever it ends, as if the first one had served before."""
    served: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    served.set_result(None)
    several._serving[1] = served
    return asyncio.create_task(several._keep(1))
