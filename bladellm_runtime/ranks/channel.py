"""The way of step plans from rank 0 to the other ranks, and of their reports back: ZMQ, in order, bounded, no loss.

On one host it is a socket file that only this user may open. Between hosts it is TCP, encrypted with keys made from a
secret that all hosts have: who does not know it can neither read plans nor report.
"""

import errno
import hashlib
import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
from zmq.utils import z85

from bladellm_runtime.ranks.messages import (
    Numbered,
    RankOrder,
    RankReport,
    decode_order,
    decode_report,
    encode,
)
from bladellm_runtime.wire.contexts import end_context, open_context

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 256
"""Orders that may wait on one side of the wire; ranks that compute together are two steps apart at most."""
SEND_PATIENCE = 8.0
"""Seconds to wait for a full wire to drain."""
RETRY_SECONDS = 0.001
MAX_REPORT_BYTES = 1 << 20
MAX_ORDER_BYTES = 1 << 30
LINGER_MS = 500
PULSE = b"pulse"
"""Behind its rank, what a rank's second socket is called, whose messages a busy rank takes too."""
ALIVE, ENDED = b"alive", b"ended"
"""What rank 0 answers to pulses: that it is there, or that the group has ended."""


class ChannelBroken(ConnectionError):
    """An order cannot reach a rank any more, or one was lost."""


@dataclass(frozen=True, slots=True)
class Secret:
    """Keys of both ends, made from the bytes that all hosts share: a client needs the server's to be heard at all."""

    shared: bytes

    def guard_server(self, socket: "zmq.Socket[Any]") -> None:
        """Let only those in who know the secret."""
        socket.curve_publickey, socket.curve_secretkey = self._keys(b"rank 0")
        socket.curve_server = True

    def guard_client(self, socket: "zmq.Socket[Any]") -> None:
        """Prove to know the secret, and talk to nobody who does not."""
        socket.curve_serverkey, _ = self._keys(b"rank 0")
        socket.curve_publickey, socket.curve_secretkey = self._keys(b"ranks")

    def _keys(self, role: bytes) -> tuple[bytes, bytes]:
        secret = z85.encode(hashlib.blake2b(self.shared, digest_size=32, person=role).digest())
        return zmq.curve_public(secret), secret


class PlanSender:
    """Rank 0's end. The thread that launches steps sends, the one that watches the ranks reads reports."""

    def __init__(self, address: str, ranks: Iterable[int], secret: Secret | None = None) -> None:
        """Bind the address. Raises `ChannelBroken` where that cannot be done."""
        self._context = open_context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.set(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
        self._socket.set(zmq.LINGER, LINGER_MS)
        listen(self._context, self._socket, address, secret)
        # A socket may change hands between threads behind a lock.
        self._lock = threading.Lock()
        self._names = [_name(rank) for rank in ranks]
        self._strangers: set[bytes] = set()
        """Ranks that there are not, of a host that was given other degrees."""
        self._ended = False
        self.sent = 0
        """Orders so far."""

    def send(self, order: RankOrder) -> None:
        """Send to every rank, without waiting for any. Raises `ChannelBroken` for one that is not there, or takes
        nothing for `SEND_PATIENCE` seconds."""
        frame = encode(Numbered(self.sent, order))
        self.sent += 1
        for name in self._names:
            self._send(name, frame)

    def reports(self) -> list[RankReport]:
        """All reports that have come, oldest first. Answers pulses."""
        with self._lock:
            return self._receive_all()

    def reaches(self, rank: int) -> bool:
        """Whether a rank that has reported is still connected."""
        with self._lock:
            return self._answer(_name(rank) + PULSE, ALIVE)

    def end(self) -> None:
        """Send no more orders, and tell the ranks, as far as they can be reached, that the group has ended."""
        self._ended = True
        with self._lock:
            for name in (*self._names, *self._strangers):
                self._answer(name + PULSE, ENDED)

    def close(self) -> None:
        """Close the socket; what was sent gets half a second to leave."""
        with self._lock:
            end_context(self._context)

    def _send(self, name: bytes, frame: bytes) -> None:
        deadline = time.monotonic() + SEND_PATIENCE
        while True:
            try:
                with self._lock:
                    self._socket.send(name, zmq.SNDMORE | zmq.NOBLOCK)
                    self._socket.send(frame, zmq.NOBLOCK)
                return
            except zmq.ZMQError as error:
                lasting = error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH)
                if lasting or self._ended or time.monotonic() > deadline:
                    raise ChannelBroken(f"rank {name.decode()} takes no orders: {error.strerror}") from error
            time.sleep(RETRY_SECONDS)

    def _receive_all(self) -> list[RankReport]:
        reports: list[RankReport] = []
        while True:
            try:
                name, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return reports
            except ValueError:
                continue  # not of two frames
            try:
                reports.append(decode_report(frame))
            except (msgspec.DecodeError, ValueError) as error:
                logger.warning("dropped a report of %d bytes that does not decode: %s", len(frame), error)
                continue
            if name.endswith(PULSE):
                self._answer(name, ALIVE)
            elif name not in self._names:
                self._strangers.add(name)

    def _answer(self, name: bytes, answer: bytes) -> bool:
        """Whether there was anybody to answer."""
        try:
            self._socket.send(name, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(answer, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != errno.EHOSTUNREACH
        return True


class PlanReceiver:
    """A rank's end, for the thread that runs steps."""

    def __init__(self, address: str, rank: int, secret: Secret | None = None) -> None:
        self._context = open_context()
        self._socket = connect(self._context, address, _name(rank), secret)
        self._next = 0

    def receive(self, timeout: float | None) -> RankOrder | None:
        """The next order, None when none comes within `timeout` seconds. Raises `ChannelBroken` when one was lost."""
        if not self._socket.poll(None if timeout is None else int(timeout * 1000)):
            return None
        message = decode_order(self._socket.recv())
        if message.number != self._next:
            raise ChannelBroken(f"order {self._next} was lost: {message.number} came instead")
        self._next += 1
        return message.order

    def send(self, report: RankReport) -> None:
        """Report to rank 0."""
        self._socket.send(encode(report), zmq.NOBLOCK)

    def close(self) -> None:
        """Close the socket; reports get half a second to leave."""
        end_context(self._context)


def listen(context: "zmq.Context[Any]", socket: "zmq.Socket[Any]", address: str, secret: Secret | None) -> None:
    """Bind a socket of rank 0. Raises `ChannelBroken`, the context ended, where that cannot be done."""
    socket.set(zmq.IPV6, int("[" in address))
    if secret is not None:
        secret.guard_server(socket)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        end_context(context)
        raise ChannelBroken(f"{address} cannot be listened on: {error.strerror}") from error


def connect(context: "zmq.Context[Any]", address: str, name: bytes, secret: Secret | None) -> "zmq.Socket[Any]":
    """A rank's socket, which may be there before rank 0's is."""
    socket: zmq.Socket[Any] = context.socket(zmq.DEALER)
    socket.set(zmq.ROUTING_ID, name)
    socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.set(zmq.MAXMSGSIZE, MAX_ORDER_BYTES)
    socket.set(zmq.LINGER, LINGER_MS)
    socket.set(zmq.IPV6, int("[" in address))
    if secret is not None:
        secret.guard_client(socket)
    socket.connect(address)
    return socket


def _name(rank: int) -> bytes:
    return b"%d" % rank
