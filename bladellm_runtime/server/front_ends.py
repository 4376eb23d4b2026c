"""The front ends besides the first: processes that it starts, starts again when they die, and ends."""

import asyncio
import contextlib
import fcntl
import logging
import os
import socket
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.server.place import Place
from bladellm_runtime.wire.client import EngineClient
from bladellm_runtime.wire.host import write_line
from bladellm_runtime.wire.transport import private_folder

logger = logging.getLogger(__name__)

COMMAND = [sys.executable, "-m", "bladellm_runtime.server.front_end_process"]
RESTART_SECONDS, LONGEST_RESTART_SECONDS = 0.5, 30.0
"""The pause before a front end that has died is started again; twice as long after each start at which it does not come
to serve, up to the second."""


class FrontEndLaunch(msgspec.Struct, forbid_unknown_fields=True):
    """The first line of a front end's standard input. `start` counts the starts of front end `number` from 0."""

    args: ServingArgs
    model_folder: str
    folder: str
    number: int
    front_ends: int
    start: int
    listener: int

    @property
    def address(self) -> str:
        """Where the engine is to find it; another one for each start, so that no message comes to the wrong one."""
        return f"ipc://{self.folder}/engine-{self.number}-{self.start}"


class EngineEnded(msgspec.Struct, tag="engine_ended", frozen=True):
    """Order to a front end: the engine has ended, as `message` says."""

    message: str


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Order to a front end: what a signal is to the first; a second one does not wait for open requests."""


Order = EngineEnded | Stop
READY = "ready"


class FrontEnds:
    """All front ends but the first, which this process is; none, if there is only one."""

    def __init__(self, args: ServingArgs, model_folder: Path, listener: socket.socket, front_ends: int) -> None:
        self._args = args
        self._model_folder = model_folder
        self._listener = listener
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock: int | None = None
        self.place = Place()
        if front_ends > 1:
            self._folder = private_folder()
            # Who tidies temporary folders up leaves locked ones alone, however old the files in them.
            self._lock = os.open(self._folder.name, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_SH)
            self.place = Place.first(Path(self._folder.name), front_ends)
        self._keepers: list[asyncio.Task[None]] = []
        self._processes: dict[int, Process] = {}
        self._serving: dict[int, asyncio.Future[None]] = {}
        self._client: EngineClient | None = None
        self._ending = asyncio.Event()

    async def start(self) -> None:
        """Start them all. They load what they need, and wait for the engine."""
        for number in range(1, self.place.front_ends):
            self._serving[number] = asyncio.get_running_loop().create_future()
            self._keepers.append(asyncio.create_task(self._keep(number)))

    async def unless_one_ends(self, start: Coroutine[Any, Any, EngineClient]) -> EngineClient:
        """The engine of this start. Raises `UserError` as soon as one of them has ended, however long a start takes."""
        engine = asyncio.create_task(start)
        ends = self._serving.values()  # None can serve before it is attached to an engine.
        waits: list[asyncio.Future[Any]] = [engine, *ends]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for end in ends:
                if end.done():
                    end.result()
            return await asyncio.shield(engine)
        except BaseException:
            engine.cancel()
            with contextlib.suppress(asyncio.CancelledError, UserError):
                await (await engine).close(1.0)
            raise

    async def attach(self, client: EngineClient) -> None:
        """Give them an engine that is ready, and wait until they serve. Raises `UserError` when one of them cannot."""
        self._client = client
        client.on_stuck.append(self._kill)
        client.on_failure.append(self._on_engine_end)
        for number in self._serving:
            client.attach(number, self._launch(number, 0).address)
        await asyncio.gather(*self._serving.values())

    def stop(self) -> None:
        """Have them finish their requests and exit; a second call ends these requests at once."""
        self._ending.set()
        self._tell(Stop())

    async def close(self, timeout: float) -> None:
        """Wait up to `timeout` seconds until they have exited, then kill them."""
        self._ending.set()
        for number, serving in self._serving.items():
            if not serving.done():
                serving.cancel()
                self._kill(number)
            elif not serving.cancelled():
                serving.exception()  # Whatever it is, the server has not waited for it.
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=timeout)
        for number in self._processes:
            self._kill(number)
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._folder is not None:
            self._folder.cleanup()
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    async def _keep(self, number: int) -> None:
        """Run a front end; when it dies while it should serve, put another in its place."""
        start, pause = 0, RESTART_SECONDS
        while not self._ending.is_set():
            last_words, code = await self._run(self._launch(number, start))
            if self._ending.is_set():
                return
            if not self._serving[number].done():
                error = UserError(last_words or f"front end {number} {_how(code)} before it could serve")
                error.exit_code = max(code, 1)
                self._serving[number].set_exception(error)
                return
            why = f"{_how(code)}: {last_words}" if last_words not in ("", READY) else _how(code)
            logger.error("front end %d %s; its requests are lost, and another takes its place", number, why)
            self.place.counts.forget(number)
            start += 1
            pause = RESTART_SECONDS if last_words == READY else min(2 * pause, LONGEST_RESTART_SECONDS)
            if self._client is not None:
                self._client.attach(number, self._launch(number, start).address)
            await asyncio.sleep(pause)

    async def _run(self, launch: FrontEndLaunch) -> tuple[str, int]:
        """Run one process to its end; returns the sentence it ended with, if any, and its exit code."""
        # In a session of its own, so that Ctrl-C reaches the first front end alone, which then tells the others.
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND, stdin=PIPE, stdout=PIPE, pass_fds=(launch.listener,), start_new_session=True
            )
        except OSError as error:
            return f"front end {launch.number} cannot be started: {COMMAND[0]}: {error.strerror}", 1
        self._processes[launch.number] = process
        if self._ending.is_set():
            process.kill()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a process without the pipes it was started with")
        write_line(process, msgspec.json.encode(launch) + b"\n")
        last_words, serving = "", self._serving[launch.number]
        async for line in process.stdout:
            last_words = line.decode().strip()
            if last_words == READY and not serving.done():
                serving.set_result(None)
        code = await process.wait()
        process.stdin.close()
        return last_words, code

    def _launch(self, number: int, start: int) -> FrontEndLaunch:
        folder = "" if self._folder is None else self._folder.name
        return FrontEndLaunch(
            self._args,
            str(self._model_folder),
            folder,
            number,
            self.place.front_ends,
            start,
            self._listener.fileno(),
        )

    def _on_engine_end(self, message: str) -> None:
        self._ending.set()
        self._tell(EngineEnded(message))
        for serving in self._serving.values():
            if not serving.done():
                serving.set_exception(UserError(message))

    def _tell(self, order: Order) -> None:
        for process in self._processes.values():
            write_line(process, msgspec.json.encode(order) + b"\n")

    def _kill(self, number: int) -> None:
        process = self._processes.get(number)
        if process is not None and process.returncode is None:
            # It may end at this very moment.
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"exited with {code}"
