"""One HTTP request and its answer over raw ASGI: headers, the bounded body, whole and streamed answers, ids."""

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, Protocol

from bladellm_runtime.server.choice import TextWriter
from bladellm_runtime.server.errors import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Header = tuple[bytes, bytes]


class BodyWriter(Protocol):
    """Writes parts of a started stream past `send`, as long as nothing has to wait."""

    def write(self, make: Callable[[], bytes]) -> bool:
        """Write what `make` makes, and return True; or return False at once if that would have to wait."""

    def between(self, before: bytes, after: bytes) -> TextWriter | None:
        """Writes parts of which only what comes between these two changes; None where the server cannot."""


ABORT_EXTENSION = "bladellm.abort"
"""Key in the scope's `extensions` of a function that drops the connection at once, unsent bytes and all."""
WRITE_EXTENSION = "bladellm.write"
"""Key in the scope's `extensions` of the answer's `BodyWriter`."""
EXCHANGE = "bladellm.exchange"
"""Key in the scope under which a cold route finds the exchange it answers."""
LINGER_SECONDS = 2.0
MIN_BODY_RATE = 65536.0
"""Bytes a second at which a body must arrive, after a first grace."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:\-]{1,128}")
_JSON = (b"content-type", b"application/json")
_EVENT_STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))
_CLOSE = (b"connection", b"close")


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Exchange:
    """A request being answered. Exactly one of `respond`, `fail` or `start_stream` may begin the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request_id = _request_id(self.header(b"x-request-id"))
        self.started = False
        self.ended = False
        """True once the last part of the answer is being sent."""
        self.body_read = not self._has_body()

    def header(self, name: bytes) -> bytes | None:
        """The value of the first header with this lower-case name."""
        return next((value for key, value in self.scope["headers"] if key == name), None)

    def check_json(self) -> None:
        """Raise `ApiError` 415 unless the body is declared as JSON that is not compressed."""
        declared = self.header(b"content-type") or b""
        if declared.split(b";")[0].strip().lower() != b"application/json":
            raise ApiError(415, "The request body must be JSON: send the header Content-Type: application/json")
        if (self.header(b"content-encoding") or b"identity").strip().lower() != b"identity":
            raise ApiError(415, "The request body must not be compressed: leave out the header Content-Encoding")

    @property
    def declared_bytes(self) -> int | None:
        """The length of the body, None where it is not said before."""
        declared = self.header(b"content-length")
        return None if declared is None else int(declared)

    async def read_body(self, limit: int, patience: float) -> bytes:
        """The whole body.

        Raises `ApiError` 413 beyond `limit` bytes, before reading any when its declared length is too large, 408 when
        it takes longer than `patience` seconds and what `MIN_BODY_RATE` allows, and `ClientGone`.
        """
        if (self.declared_bytes or 0) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        deadline = asyncio.get_running_loop().time() + patience
        while not self.body_read:
            message = await self._receive_before(deadline + size / MIN_BODY_RATE)
            if message["type"] == "http.disconnect":
                raise ClientGone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise _too_large(limit)
            self.body_read = not message.get("more_body", False)
        return b"".join(parts)

    async def wait_disconnect(self) -> None:
        """Return when the client is gone. Only after the body was read."""
        while (await self.receive())["type"] != "http.disconnect":
            pass

    async def respond(self, status: int, body: bytes, headers: Iterable[Header] = ()) -> None:
        """Send a whole JSON answer."""
        await self._start(status, [_JSON, (b"content-length", b"%d" % len(body)), *headers])
        await self.end(body)

    async def fail(self, error: ApiError) -> None:
        """Send an error. When the request's body was not read to its end, the connection is closed after it."""
        body = error.body()
        await self._start(error.status, [_JSON, (b"content-length", b"%d" % len(body)), *_error_headers(error)])
        await self.end(body)

    async def cut_short(self, error: ApiError) -> None:
        """Send an error without reading what is left of the body; where an answer has begun, close the connection."""
        if self.started:
            self.drop()
            return
        self.body_read = True
        await self.fail(error)

    async def end(self, body: bytes) -> None:
        """Send the last part of an answer."""
        self.ended = True
        if not self.body_read:
            await self.send({"type": "http.response.body", "body": body, "more_body": True})
            # Closing with unread data resets the connection, and the client might never see the answer.
            await self._discard_body()
            body = b""
        await self.send({"type": "http.response.body", "body": body})

    async def start_stream(self, headers: Iterable[Header] = ()) -> None:
        """Begin a stream of server-sent events."""
        await self._start(200, [*_EVENT_STREAM, *headers])

    def own_headers(self) -> list[Header]:
        """Headers that every answer has."""
        return [(b"x-request-id", self.request_id), *([] if self.body_read else [_CLOSE])]

    @property
    def writer(self) -> BodyWriter | None:
        """Writes parts of a started stream at once, past `send`; None where the server cannot."""
        found: BodyWriter | None = self.scope.get("extensions", {}).get(WRITE_EXTENSION)
        return found

    def drop(self) -> None:
        """Close the connection at once, without waiting for unsent bytes."""
        abort = self.scope.get("extensions", {}).get(ABORT_EXTENSION)
        if abort is not None:
            abort()

    async def _start(self, status: int, headers: list[Header]) -> None:
        self.started = True
        await self.send({"type": "http.response.start", "status": status, "headers": [*headers, *self.own_headers()]})

    def _has_body(self) -> bool:
        length = self.header(b"content-length")
        return self.header(b"transfer-encoding") is not None or (length is not None and length != b"0")

    async def _receive_before(self, deadline: float) -> Message:
        try:
            async with asyncio.timeout_at(deadline):
                return await self.receive()
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time") from None

    async def _discard_body(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_SECONDS):
                while (message := await self.receive())["type"] == "http.request" and message.get("more_body"):
                    pass


def _request_id(given: bytes | None) -> bytes:
    """The client's id if it is short and plain, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return secrets.token_hex(12).encode()


def _error_headers(error: ApiError) -> list[Header]:
    headers = [(b"allow", b"POST")] if error.status == 405 else []
    if error.retry_after is not None:
        headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after)))
    return headers


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {limit} bytes, the limit of --max_body_mib")
