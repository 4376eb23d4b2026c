"""One ZMQ pair: the front end binds, the engine connects. Messages are msgpack, never pickle."""

import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bladellm_runtime.wire.messages import EngineMessage, FrontMessage

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 4096
"""Messages that may wait on one side of the wire; an engine step is one message."""
SEND_PATIENCE = 10.0
"""Seconds the engine waits for a full wire to drain before it takes the front end for gone."""
CLOSE_LINGER_MS = 500

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
# A decoder's type parameter cannot be a union for mypy, hence the annotations.
_decode_front_message: Callable[[bytes], FrontMessage] = msgspec.msgpack.Decoder(FrontMessage).decode
_decode_engine_message: Callable[[bytes], EngineMessage] = msgspec.msgpack.Decoder(EngineMessage).decode


class FrontEndGone(ConnectionError):
    """Nobody takes the engine's messages any more; the engine should release everything and exit."""


def private_address() -> tuple[str, tempfile.TemporaryDirectory[str]]:
    """An `ipc://` address in a new folder that only this user may enter, and the folder, to be removed at the end."""
    folder = tempfile.TemporaryDirectory(prefix="bladellm-")  # made with mode 0700
    return f"ipc://{Path(folder.name) / 'engine'}", folder


def open_socket(context: zmq.Context[Any]) -> zmq.Socket[Any]:
    """A pair socket with bounded queues, which does not keep the process alive for unsent messages."""
    socket: zmq.Socket[Any] = context.socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
    socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.set(zmq.LINGER, CLOSE_LINGER_MS)
    return socket


def decode_engine_message(frame: bytes) -> EngineMessage | None:
    """The message in a frame, or None, logged, when it is not one."""
    try:
        return _decode_engine_message(frame)
    except (msgspec.DecodeError, ValueError) as error:
        logger.warning("dropped a message of %d bytes from the engine that does not decode: %s", len(frame), error)
        return None


def decode_front_message(frame: bytes) -> FrontMessage | None:
    """The message in a frame, or None, logged, when it is not one."""
    try:
        return _decode_front_message(frame)
    except (msgspec.DecodeError, ValueError) as error:
        logger.warning("dropped a message of %d bytes to the engine that does not decode: %s", len(frame), error)
        return None


class EnginePort:
    """The engine's end of the wire; synchronous, to be used by one thread.

    For an `inproc://` address `context` must be the front end's, and is not closed here; else the port makes its own.
    """

    def __init__(self, address: str, context: zmq.Context[Any] | None = None) -> None:
        self._own_context = context is None
        self._context = zmq.Context() if context is None else context
        self._socket = open_socket(self._context)
        self._socket.connect(address)

    def receive(self, timeout: float) -> list[FrontMessage]:
        """All waiting messages, oldest first; with none, waits up to `timeout` seconds for the first."""
        if timeout > 0 and not self._socket.poll(int(timeout * 1000), zmq.POLLIN):
            return []
        messages: list[FrontMessage] = []
        while (frame := self._receive_frame()) is not None:
            message = decode_front_message(frame)
            if message is not None:
                messages.append(message)
        return messages

    def send(self, message: EngineMessage) -> None:
        """Send without blocking. Raises `FrontEndGone` when the wire stays full for `SEND_PATIENCE` seconds."""
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """`send` for bytes that are encoded already."""
        deadline = time.monotonic() + SEND_PATIENCE
        while True:
            try:
                self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise FrontEndGone("the front end has stopped taking the engine's messages") from None
                self._socket.poll(int(left * 1000) + 1, zmq.POLLOUT)

    def close(self) -> None:
        """Close the socket; messages already sent get half a second to leave."""
        self._socket.close()
        if self._own_context:
            self._context.term()

    def _receive_frame(self) -> bytes | None:
        try:
            return bytes(self._socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return None
