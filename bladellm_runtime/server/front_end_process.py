"""A front end besides the first, in a process of its own: `python -m bladellm_runtime.server.front_end_process`.

Standard input tells it what to do, a JSON object a line: a `FrontEndLaunch`, then orders. Its end means that the first
front end has died, which ends this process too. Standard output says when it serves.
"""

import asyncio
import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import uvloop

from bladellm_runtime.errors import UserError
from bladellm_runtime.logs import log_to_stderr
from bladellm_runtime.server.front_ends import READY, EngineEnded, FrontEndLaunch, Order
from bladellm_runtime.server.lifecycle import ENGINE_START_SECONDS, Server
from bladellm_runtime.server.place import Place
from bladellm_runtime.wire.client import EngineClient
from bladellm_runtime.wire.signals import leave_signals_to_starter

logger = logging.getLogger(__name__)


class JoiningServer(Server):
    """A server that shares the first one's socket and engine, and stops when it is told to."""

    def __init__(self, launch: FrontEndLaunch, listener: socket.socket) -> None:
        place = Place.other(Path(launch.folder), launch.number, launch.front_ends)
        super().__init__(launch.args, Path(launch.model_folder), listener, place)
        self._launch = launch
        self._engine_end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def obey(self, order: Order) -> None:
        """Do what the first front end says."""
        if not isinstance(order, EngineEnded):
            self.stop()
        elif not self._engine_end.done():
            self._engine_end.set_result(order.message)

    async def _start_engine(self) -> EngineClient:
        launch = self._launch
        return await EngineClient.join(
            launch.address, launch.number, launch.start, self._engine_end, ENGINE_START_SECONDS
        )

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """Leave signals to the first front end."""
        yield


def watch_orders(loop: asyncio.AbstractEventLoop, obey: Callable[[Order], None]) -> None:
    """Pass orders on until standard input ends; then end this process, as the first front end has ended."""
    decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
    for line in sys.stdin.buffer:
        order = decoder.decode(line)
        # The loop is closed when the server has ended anyway.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(obey, order)
    os._exit(1)


async def serve(launch: FrontEndLaunch, listener: socket.socket) -> int:
    """Serve until told to stop, or the engine has ended; returns the exit code."""
    server = JoiningServer(launch, listener)
    loop = asyncio.get_running_loop()
    threading.Thread(target=watch_orders, args=(loop, server.obey), name="orders", daemon=True).start()
    return await server.run(lambda url, client: print(READY, flush=True))


def main() -> int:
    """Entry point of the process; returns its exit code."""
    leave_signals_to_starter()
    launch = msgspec.json.decode(sys.stdin.buffer.readline(), type=FrontEndLaunch)
    log_to_stderr(launch.args.log_level, f"server {launch.number}")
    listener = socket.socket(fileno=launch.listener)
    listener.setblocking(False)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(launch, listener))
    except UserError as error:
        print(error, flush=True)  # The first front end ends with this sentence.
        return error.exit_code


def end(code: int) -> None:
    """End the process at once."""
    logging.shutdown()
    # Not sys.exit: the watch thread blocks in a read that interpreter shutdown would wait for.
    os._exit(code)


if __name__ == "__main__":
    end(main())
