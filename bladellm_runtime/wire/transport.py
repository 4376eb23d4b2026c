"""A ZMQ pair a front end: the front end binds, the engine connects. Messages are msgpack, never pickle."""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import zmq

from bladellm_runtime.errors import UserError
from bladellm_runtime.wire.contexts import end_context, open_context
from bladellm_runtime.wire.messages import (
    AttachFrontEnd,
    EngineFailed,
    EngineMessage,
    EngineReady,
    FrontEndStuck,
    FrontMessage,
    StepOutput,
)
from bladellm_runtime.wire.shares import shares_of

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 4096
"""Messages that may wait on one side of the wire; an engine step is one message."""
SEND_PATIENCE = 10.0
"""Seconds the engine waits for a full wire to drain before it takes the front end for gone."""
CLOSE_LINGER_MS = 500
HEARTBEAT_SECONDS = 0.5
"""The longest time between two messages to a front end while steps run, whether or not it has requests in them."""
LONGEST_NAME = len("/bladellm-12345678/results")
"""The longest name of a socket in a private folder: those between ranks are in a folder below."""

encode: Callable[[Any], bytes] = msgspec.msgpack.Encoder().encode
# A decoder's type parameter cannot be a union for mypy, hence the annotations.
_decode_front_message: Callable[[bytes], FrontMessage] = msgspec.msgpack.Decoder(FrontMessage).decode
_decode_engine_message: Callable[[bytes], EngineMessage] = msgspec.msgpack.Decoder(EngineMessage).decode


class FrontEndGone(ConnectionError):
    """Nobody takes the engine's messages any more; the engine should release everything and exit."""


def private_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder for sockets that only this user may enter, to be removed at the end.

    Raises `UserError` where none can be made, or its path is too long for the names of sockets.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="bladellm-")  # made with mode 0700
    except OSError as error:
        raise UserError(f"no temporary folder can be made ({error.strerror}); set TMPDIR to one with room") from error
    most = zmq.IPC_PATH_MAX_LEN - LONGEST_NAME
    if len(os.fsencode(folder.name)) <= most:
        return folder
    folder.cleanup()
    parent = Path(folder.name).parent
    excess = len(os.fsencode(folder.name)) - most
    raise UserError(f"the path of {parent} is {excess} bytes too long for sockets in it; set TMPDIR to a shorter one")


def private_address() -> tuple[str, tempfile.TemporaryDirectory[str]]:
    """An `ipc://` address in a new folder that only this user may enter, and the folder, to be removed at the end.

    Raises `UserError`.
    """
    folder = private_folder()
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

    It begins with the first front end, whose end is the engine's. Others may be attached, which come and go.
    For an `inproc://` address `context` must be the front end's, and is not closed here; else the port makes its own.
    """

    def __init__(self, address: str, context: zmq.Context[Any] | None = None) -> None:
        self._own_context = context is None
        self._context = open_context() if context is None else context
        self._socket = open_socket(self._context)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._others: dict[int, _OtherFrontEnd] = {}
        self._last_sent = 0.0
        self._ready: EngineReady | None = None
        # Of use to `end` alone, which another thread calls.
        self._lock = threading.Lock()

    def attach(self, message: AttachFrontEnd) -> None:
        """Connect to another front end, in place of the one that had its number, and tell it what the first was told.

        What was on its way to or from the one before it is lost.
        """
        self._detach(message.front_end)
        socket = open_socket(self._context)
        socket.connect(message.address)
        self._poller.register(socket, zmq.POLLIN)
        self._others[message.front_end] = _OtherFrontEnd(socket)
        if self._ready is not None:
            self._send_to_other(message.front_end, encode(self._ready))

    def receive(self, timeout: float) -> list[FrontMessage]:
        """All waiting messages, oldest first; with none, waits up to `timeout` seconds for the first."""
        with self._lock:
            if timeout > 0 and not self._poller.poll(int(timeout * 1000)):
                return []
            messages = _receive_all(self._socket)
            for other in self._others.values():
                messages += _receive_all(other.socket)
            return messages

    def send(self, message: EngineMessage) -> None:
        """Send without blocking: to each front end its own requests' part of a step, and everything else to all.

        Raises `FrontEndGone` when the wire to the first front end stays full for `SEND_PATIENCE` seconds. Another one
        whose wire is full is reported to the first.
        """
        if isinstance(message, EngineReady):
            self._ready = message
        if not self._others:
            self.send_frame(encode(message))
        elif isinstance(message, StepOutput) and message.deltas:
            self._send_shares(message)
        else:
            frame = encode(message)
            self.send_frame(frame)
            for number in self._others:
                self._send_to_other(number, frame)

    def send_frame(self, frame: bytes) -> None:
        """Send to the first front end alone what is encoded already; errors as in `send`."""
        deadline = time.monotonic() + SEND_PATIENCE
        while True:
            try:
                with self._lock:
                    self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.Again:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise FrontEndGone("the front end has stopped taking the engine's messages") from None
                self._socket.poll(int(left * 1000) + 1, zmq.POLLOUT)

    def end(self, message: EngineFailed) -> None:
        """Send a last message to all, and close; from another thread than the others' when that hangs elsewhere."""
        frame = encode(message)
        with self._lock:
            for socket in (self._socket, *(other.socket for other in self._others.values())):
                with suppress(zmq.Again):
                    socket.send(frame, zmq.NOBLOCK)
        self.close()

    def close(self) -> None:
        """Close the socket; messages already sent get half a second to leave."""
        self._socket.close()
        for number in list(self._others):
            self._detach(number)
        if self._own_context:
            end_context(self._context)

    def _detach(self, number: int) -> None:
        other = self._others.pop(number, None)
        if other is not None:
            self._poller.unregister(other.socket)
            other.socket.close()

    def _send_shares(self, message: StepOutput) -> None:
        """One message to each front end with requests in the step, and to others whose last one is long ago."""
        shares = shares_of(message.deltas, [0, *self._others])
        now = message.stats.time
        for number, other in self._others.items():
            if shares[number] or now - other.last_sent >= HEARTBEAT_SECONDS:
                other.last_sent = now
                self._send_to_other(number, encode(StepOutput(shares[number], message.stats)))
        if shares[0] or now - self._last_sent >= HEARTBEAT_SECONDS:
            self._last_sent = now
            self.send_frame(encode(StepOutput(shares[0], message.stats)))

    def _send_to_other(self, number: int, frame: bytes) -> None:
        other = self._others[number]
        try:
            other.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            if not other.stuck:
                other.stuck = True
                self.send_frame(encode(FrontEndStuck(number)))


@dataclass(slots=True)
class _OtherFrontEnd:
    """A front end besides the first."""

    socket: "zmq.Socket[Any]"
    last_sent: float = 0.0
    stuck: bool = False


def _receive_all(socket: "zmq.Socket[Any]") -> list[FrontMessage]:
    """The messages that wait in a socket, oldest first."""
    messages: list[FrontMessage] = []
    while True:
        try:
            frame = bytes(socket.recv(zmq.NOBLOCK))
        except zmq.Again:
            return messages
        message = decode_front_message(frame)
        if message is not None:
            messages.append(message)
