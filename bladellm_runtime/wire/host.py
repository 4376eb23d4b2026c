"""Where an engine lives: a process of its own, or a thread of the front end's. Starting, watching and ending it."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.wire.engine_process import EngineProcess
from bladellm_runtime.wire.transport import EnginePort

logger = logging.getLogger(__name__)

KILL_SECONDS = 5.0


class EngineHost(Protocol):
    """What the client needs of an engine's home."""

    @property
    def process_id(self) -> int | None:
        """The engine's process, or None when it has none of its own."""

    @property
    def owned(self) -> bool:
        """True when this client is the one that started the engine, and ends it."""

    @property
    def alive(self) -> bool:
        """True from a successful start to the engine's end."""

    async def start(self) -> None:
        """Bring the engine up; raises `UserError` when it cannot be started at all."""

    async def wait(self) -> str:
        """Return, once the engine has ended, a sentence that says how."""

    async def stop(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the engine to end by itself, then end it."""


class ProcessHost:
    """An engine process, which `start` tells what to serve."""

    def __init__(self, process: EngineProcess, address: str, args: EngineArgs) -> None:
        self._process = process
        self._line = launch_line(address, args)
        self._loop = asyncio.get_running_loop()
        self._code: asyncio.Future[int] = self._loop.create_future()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()

    owned = True

    @property
    def process_id(self) -> int:
        """The process id, also after its end."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while the process runs."""
        return not self._code.done()

    async def start(self) -> None:
        """Tell the process what to serve."""
        self._process.write(self._line)

    async def wait(self) -> str:
        """Wait for the process; says its exit code or signal."""
        code = await asyncio.shield(self._code)
        return (
            f"the engine process was killed by signal {-code}" if code < 0 else f"the engine process exited with {code}"
        )

    async def stop(self, timeout: float) -> None:
        """Wait, then close its standard input, which ends it, then kill it."""
        if not await self._ended_within(timeout):
            self._process.end_input()
            if not await self._ended_within(min(timeout, 1.0)):
                if timeout > 0:
                    logger.info("the engine did not exit in time; killing process %d", self.process_id)
                self._process.kill()
                await self._ended_within(KILL_SECONDS)
        self._process.end_input()

    def _watch(self) -> None:
        code = self._process.wait()
        # The loop may have ended before.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._code.set_result, code)

    async def _ended_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._code)
        except TimeoutError:
            return False
        return True


class ThreadHost:
    """An engine in a daemon thread. It cannot be killed: one that hangs is left behind."""

    def __init__(self, run: Callable[[EnginePort], None], address: str, context: zmq.Context[Any]) -> None:
        self._run = run
        self._address = address
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._outcome = "the engine thread ended"
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    owned = True

    @property
    def process_id(self) -> int | None:
        """A thread has no process of its own."""
        return None

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    async def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    async def wait(self) -> str:
        """Wait for the thread; says the exception that ended it, if any."""
        await self._ended.wait()
        return self._outcome

    async def stop(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the thread to end."""
        try:
            async with asyncio.timeout(timeout):
                await self._ended.wait()
                self._thread.join()
        except TimeoutError:
            if timeout > 0:
                logger.warning("the engine thread did not end in time")

    def _main(self) -> None:
        port = EnginePort(self._address, self._context)
        try:
            self._run(port)
        except Exception as error:
            logger.exception("the engine thread stopped")
            self._outcome = f"the engine stopped: {type(error).__name__}: {error}"
        finally:
            port.close()
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._ended.set)


class ForeignHost:
    """An engine that another front end has started, and ends; `end` completes with a sentence when it has ended."""

    process_id = None
    owned = False
    alive = False

    def __init__(self, end: asyncio.Future[str]) -> None:
        self._end = end

    async def start(self) -> None:
        """Nothing: it is started."""

    async def wait(self) -> str:
        """Wait to be told that it has ended."""
        return await asyncio.shield(self._end)

    async def stop(self, timeout: float) -> None:
        """Nothing: others use it."""


def write_line(process: asyncio.subprocess.Process, line: bytes) -> None:
    """Write to the standard input of a process; to one that has ended, nothing, as its exit code says the rest."""
    # asyncio drops what is written to a broken pipe, uvloop raises once it has seen that the pipe is broken.
    if process.stdin is not None and not process.stdin.is_closing():
        process.stdin.write(line)


def launch_line(address: str, args: EngineArgs) -> bytes:
    """The JSON line an engine process reads first: the address, and those fields of `args` that `EngineArgs` has."""
    fields = {item.name: getattr(args, item.name) for item in dataclasses.fields(EngineArgs)}
    return msgspec.json.encode({"address": address, "args": fields}) + b"\n"
