"""As much HTTP/1.1 as the mock server needs: requests with a Content-Length, one after the other on a connection."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import orjson

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 256 * 1024**2
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large", 500: "Internal Server Error"}

Handler = Callable[["HttpConnection", str, str, bytes], None]


def http_chunk(data: bytes) -> bytes:
    """One chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def http_response(status: int, content: Any) -> bytes:
    """A whole JSON response."""
    body = orjson.dumps(content)
    head = f"HTTP/1.1 {status} {REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


class HttpConnection(asyncio.Protocol):
    """Collects requests and hands them to `handler`; `closed` once the other side has gone."""

    def __init__(self, handler: Handler) -> None:
        self.closed = False
        self._handler = handler
        self._buffer = bytearray()
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio's protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Part of asyncio's protocol: bytes of requests."""
        self._buffer += data
        while (request := self._next_request()) is not None:
            self._handler(self, *request)

    def connection_lost(self, error: Exception | None) -> None:
        """Part of asyncio's protocol."""
        self.closed = True

    def write(self, data: bytes) -> None:
        """Send bytes, unless the other side has gone."""
        if not self.closed:
            self._transport.write(data)

    def close(self) -> None:
        """Hang up once everything written has left."""
        self.closed = True
        self._transport.close()

    def _next_request(self) -> tuple[str, str, bytes] | None:
        """Method, path and body of the next whole request."""
        head_end = self._buffer.find(b"\r\n\r\n")
        if head_end < 0:
            if len(self._buffer) > MAX_HEAD_BYTES:
                self._refuse()
            return None
        lines = bytes(self._buffer[:head_end]).decode("latin-1").split("\r\n")
        length = content_length(lines[1:])
        words = lines[0].split()
        if length is None or len(words) != 3:
            self._refuse()
            return None
        end = head_end + 4 + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[head_end + 4 : end])
        del self._buffer[:end]
        return words[0], words[1].partition("?")[0], body

    def _refuse(self) -> None:
        self._buffer.clear()
        self.write(http_response(400, {"error": {"message": "not a request this server understands"}}))
        self.close()


def content_length(headers: list[str]) -> int | None:
    """The length of the body; None where it is not a number or too large."""
    for line in headers:
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            text = value.strip()
            return int(text) if text.isdecimal() and len(text) < 12 and int(text) <= MAX_BODY_BYTES else None
    return 0
