"""The listening socket and a uvicorn protocol with the limits that uvicorn's own lacks.

Ours adds: a time limit and a size limit for request headers, a cap on connections that is told in HTTP, an end to
connections whose client does not read their last bytes or has left pipelined requests, and the bodies of requests that
ask for HTTP/2 beside.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import socket
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.exchange import ABORT_EXTENSION, WRITE_EXTENSION
from bladellm_runtime.server.limits import RETRY_SECONDS
from bladellm_runtime.server.shared_counts import SharedCount

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 16384
MAX_HEADERS = 100
BACKLOG = 2048
SEND_BUFFER_BYTES = 131072
"""Kernel buffer of a connection: with the transport's 64 KiB it bounds what an unread stream holds."""
DESCRIPTORS_BESIDE_CONNECTIONS, FEWEST_DESCRIPTORS = 128, 64
_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket at the first address of the host that is this machine's. Raises `UserError` without one."""
    hint = "leave it out, or give 0.0.0.0"
    if not host:
        raise UserError(f"--host is empty; {hint}")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a name that a host can have"
        raise UserError(f"--host {host} is not an address of this machine: {why}; {hint}") from error
    for family, kind, protocol, _, address in found:
        try:
            return _listen(socket.socket(family, kind, protocol), address)
        except OSError as error:
            # A name may have one of IPv6 too, on a machine that has none.
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise UserError(
                    f"--port {port} on {host} cannot be used: {error.strerror}; choose another, or 0"
                ) from error
    raise UserError(f"--host {host} is not an address of this machine; {hint}")


def _listen(listener: socket.socket, address: Any) -> socket.socket:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    try:
        listener.bind(address)
        # Listening already here makes the port ours while the model loads: a second server fails at once.
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL clients on this machine can use."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def allow_descriptors(connections: int) -> None:
    """Raise this process' limit of open files to what the connections may need, as far as it is allowed to.

    Raises `UserError` for one at which libraries abort the process.
    """
    wanted = connections + DESCRIPTORS_BESIDE_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    reachable = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if reachable < FEWEST_DESCRIPTORS:
        raise UserError(f"ulimit -n is {reachable}, too few files to serve with; set it to {wanted} or more")
    resource.setrlimit(resource.RLIMIT_NOFILE, (reachable, hard))
    if reachable < wanted:
        logger.warning("ulimit -n is %d: --max_connections %d cannot be reached", reachable, connections)


def protocol_class(args: ServingArgs, open_connections: SharedCount) -> type[HttpToolsProtocol]:
    """`GuardedProtocol` with these arguments' limits; the one on connections holds for all front ends together."""
    limits = {
        "header_timeout": args.header_timeout,
        "send_timeout": args.send_timeout,
        "max_connections": args.max_connections,
        "open_connections": open_connections,
    }
    return type("Protocol", (GuardedProtocol,), limits)


class Gate:
    """Whether a connection takes bytes now: it is neither full nor lost. Small, as it is looked at for every token."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = True


class ChunkWriter:
    """Writes parts of a chunked body, as `cycle.send` would, if that needs no waiting; see `BodyWriter`.

    The way through a task and the cycle's coroutine to the one write would cost as much as all else of a token.
    """

    def __init__(self, cycle: RequestResponseCycle, gate: Gate) -> None:
        self._cycle = cycle
        self._gate = gate

    def write(self, make: Callable[[], bytes]) -> bool:
        """Write what `make` makes."""
        cycle = self._cycle
        if not self._gate.open or cycle.response_complete or not cycle.chunked_encoding:
            return False
        part = make()
        if part:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        return True

    def between(self, before: bytes, after: bytes) -> "MiddleWriter | None":
        """Writes parts of which only what comes between these two changes."""
        if not self._cycle.chunked_encoding:
            return None
        return MiddleWriter(self._cycle.transport.write, self._gate, before, after)


class MiddleWriter:
    """Writes parts `before text after` of a chunked body that has begun; the memory it touches for one is little."""

    __slots__ = ("_before", "_end", "_gate", "_size", "_write")

    def __init__(self, write: Callable[[bytes], None], gate: Gate, before: bytes, after: bytes) -> None:
        self._write, self._gate = write, gate
        self._before, self._end = before, _ended(after)
        self._size = len(before) + len(after)

    def write(self, text: bytes) -> bool:
        """Write the part with this text, unless that has to wait."""
        if not self._gate.open:
            return False
        self._write(b"".join((_chunk_head(self._size + len(text)), self._before, text, self._end)))
        return True


@cache
def _ended(part_end: bytes) -> bytes:
    """One object for all streams of a kind: what they share stays in the processor's cache."""
    return part_end + b"\r\n"


@lru_cache(4096)
def _chunk_head(size: int) -> bytes:
    return b"%x\r\n" % size


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Its limits are class attributes, set by `protocol_class`."""

    header_timeout = 10.0
    send_timeout = 60.0
    max_connections = 4096
    open_connections: SharedCount

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._gate = Gate()
        self._quiet_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None
        self._abort_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._unanswered: list[RequestResponseCycle] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse the connection beyond the cap; else the time for its first request begins."""
        super().connection_made(transport)
        self.open_connections.add(1)
        if self.open_connections.total > self.max_connections:
            self._refuse(503, "The server has as many connections as it takes; try again later")
            return
        self._start_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Write no more, stop all timers, and let every request know: uvicorn tells the last of pipelined ones."""
        self._gate.open = False
        for cycle in self._unanswered:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        self.open_connections.add(-1)
        self._stop_header_timer()
        if self._abort_timer is not None:
            self._abort_timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The transport holds as much as it may."""
        self._gate.open = False
        super().pause_writing()

    def resume_writing(self) -> None:
        """The transport has room again."""
        self._gate.open = True
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what came, unless the parser only collects it: a header, a trailer or a chunk's head without end."""
        self._unset_keepalive_if_required()
        while data and not self._refused:
            data = self._parse(data)
        if self._quiet_bytes > MAX_HEADER_BYTES:
            self._refuse_headers()

    def on_message_begin(self) -> None:
        """A request begins: so does the time for its headers."""
        super().on_message_begin()
        self._start_header_timer()

    def on_headers_complete(self) -> None:
        """Hand the request on, unless its headers are too large or too many."""
        self._stop_header_timer()
        self._quiet_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > MAX_HEADER_BYTES or len(self.headers) > MAX_HEADERS:
            self._refuse_headers()
        elif not self._refused and not self._asks_for_upgrade:
            super().on_headers_complete()
            self._unanswered = [cycle for cycle in self._unanswered if not cycle.response_complete] + [self.cycle]
            extensions = {ABORT_EXTENSION: self.transport.abort, WRITE_EXTENSION: ChunkWriter(self.cycle, self._gate)}
            self.scope["extensions"] = extensions  # type: ignore[typeddict-item]

    def on_body(self, body: bytes) -> None:
        """Hand the body on."""
        self._quiet_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._quiet_bytes = 0
        if not self._refused and not self._asks_for_upgrade:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn says to bytes that are not HTTP, as the error object."""
        self._refuse(400, msg)

    def on_response_complete(self) -> None:
        """See that a connection that is closing does close."""
        super().on_response_complete()
        if self.transport.is_closing():
            self._abort_later()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection."""
        super().timeout_keep_alive_handler()
        self._abort_later()

    def shutdown(self) -> None:
        """Close the connection, or have it closed after its answer."""
        super().shutdown()
        if self.transport.is_closing():
            self._abort_later()

    @property
    def _asks_for_upgrade(self) -> bool:
        """Whether the request being parsed asks for another protocol, and is to be parsed again without that."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _parse(self, data: bytes) -> bytes:
        """Parse what came; returns what to parse next, if the parser has stopped in the middle."""
        self._quiet_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes the body for the other protocol. A server may ignore the wish, and then it is the body:
            # clients such as Java's send it with every request.
            if self._asks_for_upgrade and not self._refused:
                return self._head_without_upgrade() + data[upgrade.args[0] :]
        return b""

    def _head_without_upgrade(self) -> bytes:
        """The head of the request that was parsed last, for a new parser."""
        start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        lines = [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools < 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"\r\n".join([start, *lines, b"\r\n"])

    def _refuse_headers(self) -> None:
        self._refuse(431, f"The request headers are larger than {MAX_HEADER_BYTES} bytes or more than {MAX_HEADERS}")

    def _refuse(self, status: int, message: str) -> None:
        """Answer without the application, and close; in the middle of an answer there is no place for another."""
        self._refused = True
        self._stop_header_timer()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()
            return
        body = ApiError(status, message).body()
        later = b"retry-after: %d\r\n" % RETRY_SECONDS if status == 503 else b""
        self.transport.write(
            b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%bconnection: close\r\n\r\n%b"
            % (status, _REASONS[status], len(body), later, body)
        )
        self.transport.close()
        self._abort_later()

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout, self._on_slow_headers)

    def _stop_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _on_slow_headers(self) -> None:
        self._header_timer = None
        if not self._refused and not self.transport.is_closing():
            self._refuse(408, "The request headers did not arrive in time")

    def _abort_later(self) -> None:
        """Closing waits until the client has read everything; wait no longer than for any other unread answer."""
        if self._abort_timer is None:
            self._abort_timer = self.loop.call_later(self.send_timeout, self.transport.abort)
