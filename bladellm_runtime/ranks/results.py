"""The way of a pipeline's results from the last stage, which samples, to rank 0, which schedules: ZMQ, in order."""

import msgspec
import zmq

from bladellm_runtime.ranks.channel import LINGER_MS, ChannelBroken, Secret, listen
from bladellm_runtime.ranks.messages import decode_done, done_message, encode, read_done
from bladellm_runtime.scheduler.plan import StepResult
from bladellm_runtime.wire.contexts import end_context, open_context

MAX_RESULT_BYTES = 1 << 28
WAITING = 1024
"""Results that may wait on one side of the wire: many more than steps are in flight."""


class ResultReceiver:
    """Rank 0's end."""

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        """Bind the address. Raises `ChannelBroken` where that cannot be done."""
        self._context = open_context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.set(zmq.RCVHWM, WAITING)
        self._socket.set(zmq.MAXMSGSIZE, MAX_RESULT_BYTES)
        listen(self._context, self._socket, address, secret)

    def wait(self, seconds: float) -> bool:
        """Whether a result is there, or comes within so many seconds."""
        return bool(self._socket.poll(int(seconds * 1000)))

    def take(self, step: int) -> StepResult:
        """The next result, which must be that of `step`. Raises `ChannelBroken`."""
        try:
            done = decode_done(self._socket.recv())
            result = read_done(done)
        except (msgspec.DecodeError, ValueError) as error:
            raise ChannelBroken(f"the result of step {step} cannot be read: {error}") from error
        if done.step != step:
            raise ChannelBroken(f"the result of step {step} was lost: that of {done.step} came instead")
        return result

    def close(self) -> None:
        """Close the socket."""
        end_context(self._context, linger_ms=0)


class ResultSender:
    """The end of the last stage's first rank."""

    def __init__(self, address: str, secret: Secret | None = None) -> None:
        self._context = open_context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.set(zmq.SNDHWM, WAITING)
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.set(zmq.IPV6, int("[" in address))
        if secret is not None:
            secret.guard_client(self._socket)
        self._socket.connect(address)

    def send(self, step: int, result: StepResult) -> None:
        """Send the result of a step. Raises `ChannelBroken` when rank 0 takes none."""
        try:
            self._socket.send(encode(done_message(step, result)), zmq.NOBLOCK)
        except zmq.Again as error:
            raise ChannelBroken(f"rank 0 does not take the result of step {step}") from error

    def close(self) -> None:
        """Close the socket; results get half a second to leave."""
        end_context(self._context)
