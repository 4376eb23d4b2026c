"""What surrounds several front ends goes wrong: their folder, their command; the server goes on, and says so."""

import asyncio
import fcntl
import os
import shutil
import signal
import socket
from pathlib import Path

import psutil
import pytest
import uvloop

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.server import front_ends
from bladellm_runtime.server.front_ends import FrontEnds
from tests.support.front_ends import keep_one_that_served, loading_server
from tests.support.live import LiveServer, OpenStream, fake_command, until


@pytest.mark.turns
def test_a_server_whose_folder_is_removed_keeps_its_limits_and_metrics():
    """As those who tidy temporary folders up do. Who waits too long is told so, whichever front end has it."""
    command = fake_command(step_seconds=0.01, kv_tokens=2**20)
    with LiveServer(command, frontend_processes=2, max_running_requests=1, max_queue_time=1.0) as server:
        (folder,) = [path.parent for path in Path(server._folder.name).rglob("counts")]
        shutil.rmtree(folder)
        long = {"prompt": "long", "max_tokens": 3000, "ignore_eos": True}
        running = OpenStream(server, long)
        running.read(1)
        waiting = [OpenStream(server, long) for _ in range(6)]
        assert [stream.response.status for stream in waiting] == [503] * 6
        assert [server.request("/metrics")[0] for _ in range(6)] == [200] * 6
        assert server.log().count("other front ends do not learn what this one counts") == 2, "not again and again"
        os.kill(server.front_end_pids()[1], signal.SIGKILL)
        until(lambda: f"what the front ends share is not in {folder} any more" in server.log(), 20)
        assert "Traceback" not in server.log()
        assert server.json("/ready") == (200, {"status": "ok"})
        running.close()


def test_the_folder_is_locked_against_those_who_tidy_up(tmp_path):
    """systemd-tmpfiles leaves a folder alone that it cannot lock."""

    async def body() -> None:
        several = FrontEnds(ServingArgs(), tmp_path, listener, 2)
        folder = os.open(several._folder.name, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        await several.close(0.0)
        await several.close(0.0)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(folder)

    with socket.socket() as listener:
        asyncio.run(body())


def test_a_front_end_that_cannot_be_started_ends_the_start_or_is_tried_again(tmp_path, monkeypatch):
    """A machine may be out of processes or memory for a while, and an interpreter be replaced."""
    monkeypatch.setattr(front_ends, "COMMAND", ["/no/such/python"])
    monkeypatch.setattr(front_ends, "RESTART_SECONDS", 0.01)

    async def body() -> None:
        several = FrontEnds(ServingArgs(), tmp_path, listener, 2)
        await several.start()
        with pytest.raises(UserError, match=r"^front end 1 cannot be started: /no/such/python: No such file"):
            await asyncio.wait_for(several._serving[1], 5)
        await several.close(5)
        several = FrontEnds(ServingArgs(), tmp_path, listener, 2)
        keeper = keep_one_that_served(several)
        await asyncio.sleep(0.05)
        assert not keeper.done(), "nobody starts front end 1 any more"
        monkeypatch.setattr(front_ends, "COMMAND", ["sh", "-c", f"echo >> {tmp_path}/started"])
        while not (tmp_path / "started").exists():
            await asyncio.wait({keeper}, timeout=0.01)
            assert not keeper.done(), "nobody starts front end 1 any more"
        keeper.cancel()
        await several.close(0.0)

    with socket.socket() as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body())


def test_a_front_end_that_never_comes_to_serve_is_started_less_and_less_often(tmp_path, monkeypatch):
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            several._ending.set()

    async def run(*_: object) -> tuple[str, int]:
        return (front_ends.READY, -9) if len(pauses) == 9 else ("no luck", 1)

    async def body() -> None:
        monkeypatch.setattr(several, "_run", run)
        monkeypatch.setattr(front_ends.asyncio, "sleep", sleep)
        await keep_one_that_served(several)

    with socket.socket() as listener:
        several = FrontEnds(ServingArgs(), tmp_path, listener, 2)
        asyncio.run(body())
        several._folder.cleanup()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30, 30, 0.5, 1, 2]


def test_a_front_end_that_dies_while_the_model_loads_ends_the_start_at_once():
    with loading_server(frontend_processes=2) as (server, started):
        (other,) = [process for process in started if "front_end_process" in " ".join(process.cmdline())]
        other.kill()
        _, log = server.communicate(timeout=10)
    assert (server.returncode, log) == (1, "front end 1 was killed by signal 9 before it could serve\n")
    assert not psutil.wait_procs(started, 5)[1]
