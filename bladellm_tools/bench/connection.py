"""HTTP/1.1 connections made for time stamps: a part of a body reaches its receiver inside the read that brought it.

A general client hands every part through a stream and wakes a task for it, which costs more than the read itself, and
stamps it only then. Here a chunk costs one read, one pass of the HTTP parser and one call.
"""

import asyncio
import contextlib
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from bladellm_tools.bench.pacing import clock

CONNECT_SECONDS = 10.0
KEEPALIVE_SECONDS = 4.0
"""Below the 5 s after which common servers close an idle connection, so that no request meets a closing one."""
MAX_HEAD_BYTES = 256 * 1024
MAX_BODY_BYTES = 256 * 1024**2
LENGTH_HEADERS = (b"content-length", b"transfer-encoding")


class BadAnswerError(Exception):
    """What the server sent is not HTTP, or has no end."""


class Receiver(Protocol):
    """Who gets an answer. Both run inside the read; `now` is the `clock()` time before the bytes were looked at."""

    def take_head(self, now: float, status: int) -> None:
        """The status line and the headers are there."""

    def take_body(self, now: float, part: bytes) -> None:
        """A part of the body."""


class Connection(asyncio.Protocol):
    """One connection: one request at a time, as many as the server keeps it open for.

    `reusable` holds between requests; `heard` says whether anything came since the last request was sent.
    """

    def __init__(self) -> None:
        self.closed = False
        self.reusable = False
        self.heard = False
        self.idle_since = 0.0
        self._transport: asyncio.Transport
        self._parser: httptools.HttpResponseParser
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[None] | None = None
        self._now = 0.0
        self._size = 0
        self._in_head = True
        self._is_delimited = False

    async def exchange(self, request: bytes, receiver: Receiver) -> None:
        """Send a request and return when its answer has ended.

        Raises `OSError` when the connection breaks before, `BadAnswerError` for what is not HTTP.
        """
        self._parser = httptools.HttpResponseParser(self)
        self._receiver = receiver
        self.reusable = self.heard = self._is_delimited = False
        self._in_head, self._size = True, 0
        self._done = asyncio.get_running_loop().create_future()
        if self.closed:
            raise ConnectionResetError("the server closed the connection")
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._receiver = self._done = None

    def abort(self) -> None:
        """Hang up at once."""
        self.closed = True
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol: stamp first, then parse."""
        self._now = clock()
        self.heard = True
        if self._done is None:
            # Nobody asked: not a connection to use again.
            self.abort()
            return
        self._size += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(BadAnswerError(f"not an HTTP answer: {error}"))
            return
        if self._size > (MAX_HEAD_BYTES if self._in_head else MAX_BODY_BYTES):
            self._fail(BadAnswerError(f"an answer without an end: more than {self._size} bytes"))

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol. It ends a body whose length nobody told, and breaks any other."""
        self.closed = True
        if error is None and not self._in_head and not self._is_delimited:
            self._finish()
        else:
            self._fail(error or ConnectionResetError("the server closed the connection before the answer had ended"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Part of httptools' protocol."""
        self._is_delimited = self._is_delimited or name.lower() in LENGTH_HEADERS

    def on_headers_complete(self) -> None:
        """Part of httptools' protocol; an interim answer (1xx) is none."""
        status = self._parser.get_status_code()
        if self._done is None or self._done.done():
            self.reusable = False  # a second answer to one request
        elif status >= 200 and self._receiver is not None:
            self._in_head = False
            self._receiver.take_head(self._now, status)

    def on_body(self, part: bytes) -> None:
        """Part of httptools' protocol."""
        if self._receiver is not None:
            self._receiver.take_body(self._now, part)

    def on_message_complete(self) -> None:
        """Part of httptools' protocol."""
        if not self._in_head and self._receiver is not None:
            self._receiver = None
            self.reusable = self._parser.should_keep_alive() and not self.closed
            self._finish()

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class ConnectionPool:
    """Connections to one server, as many as are needed at once."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._idle: list[Connection] = []
        usual = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        given = {name.lower() for name in headers}
        fields = {name: value for name, value in usual.items() if name.lower() not in given} | headers
        lines = [f"POST {parts.path or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        self._head = ("\r\n".join(lines) + "\r\nContent-Length: ").encode("latin-1")

    async def post(self, body: bytes, receiver: Receiver) -> None:
        """Send a body and return when the answer has ended; raises what `Connection.exchange` raises.

        An idle connection that the server closed in the very moment of its use is replaced once: that is no fault.
        """
        request = b"%b%d\r\n\r\n%b" % (self._head, len(body), body)
        connection = self._take_idle()
        if connection is not None:
            with contextlib.suppress(ConnectionError):
                await self._use(connection, request, receiver)
                return
            if connection.heard:
                raise ConnectionResetError("the server closed the connection before the answer had ended")
        await self._use(await self._connect(), request, receiver)

    def close(self) -> None:
        """Hang up the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _use(self, connection: Connection, request: bytes, receiver: Receiver) -> None:
        try:
            await connection.exchange(request, receiver)
        except BaseException:
            connection.abort()
            raise
        if connection.reusable:
            connection.idle_since = clock()
            self._idle.append(connection)
        else:
            connection.abort()

    def _take_idle(self) -> Connection | None:
        """The connection used last, which is the least likely to be closed; the old ones go."""
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and not connection.closed and clock() - connection.idle_since < KEEPALIVE_SECONDS:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    Connection, self._host, self._port, ssl=True if self._tls else None
                )
        except TimeoutError as error:
            raise ConnectionError(f"no connection within {CONNECT_SECONDS:g} s") from error
        return connection
