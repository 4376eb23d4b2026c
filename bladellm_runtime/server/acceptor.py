"""Taking connections from a listening socket that several front ends share, about the same number each."""

import asyncio
import logging
import socket
from collections.abc import Callable

from bladellm_runtime.server.shared_counts import SharedCount

logger = logging.getLogger(__name__)

YIELD_SECONDS = 0.001
"""How long a front end leaves a connection to others that have fewer; one that hangs costs the rest no more."""
OUT_OF_DESCRIPTORS_SECONDS = 1.0


class Acceptor:
    """Accepts one connection at a time, and only after a pause while another front end has fewer.

    Left to the kernel, whichever process wakes first takes most of a burst, and its event loop is then the one that
    all these streams share for as long as they last.
    """

    def __init__(
        self, listener: socket.socket, connections: SharedCount, make_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[object]] = set()
        self._loop.add_reader(listener, self._on_waiting)

    def close(self) -> None:
        """Accept no more."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)

    def _on_waiting(self) -> None:
        if self._connections.excess > 0:
            self._wait(YIELD_SECONDS)
        else:
            self._accept()

    def _wait(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._on_waiting)
        self._accept()

    def _accept(self) -> None:
        """Take a connection, if another front end has not."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.warning("a connection cannot be accepted: %s", error.strerror)
            self._wait(OUT_OF_DESCRIPTORS_SECONDS)
            return
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make_protocol, connection)
        except OSError as error:
            logger.debug("a connection was lost as it was accepted: %s", error)
            connection.close()
