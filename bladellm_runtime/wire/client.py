"""The front end's end of the wire: starts the engine, hands requests to it and its deltas to their callers."""

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable
from typing import Protocol, Self

import zmq

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.request import FinishReason
from bladellm_runtime.wire.contexts import end_context, open_context
from bladellm_runtime.wire.engine_process import EngineProcess
from bladellm_runtime.wire.host import EngineHost, ForeignHost, ProcessHost, ThreadHost
from bladellm_runtime.wire.messages import (
    AbortRequests,
    AddRequest,
    AttachFrontEnd,
    EngineFailed,
    EngineMessage,
    EngineReady,
    EngineStats,
    FrontEndStuck,
    FrontMessage,
    MoveAdapter,
    RequestComing,
    RequestDelta,
    Shutdown,
    StepOutput,
    TokenDeltas,
    request_ids,
)
from bladellm_runtime.wire.transport import (
    EnginePort,
    decode_engine_message,
    encode,
    open_socket,
    private_address,
)

logger = logging.getLogger(__name__)

Sink = Callable[[RequestDelta], None]

ENGINE_DEAD = "engine_dead"
ENGINE_OVERLOADED = "engine_overloaded"
MESSAGES_PER_WAKE = 64
POLL_SECONDS = 0.1


class TokenSink(Protocol):
    """Takes the deltas of a request that are one token and nothing else."""

    def on_token(self, token: int, at: float) -> None:
        """One more token, of a step that came at `at`."""


class EngineClient:
    """Talks to one engine from an asyncio event loop; every method is to be called on that loop.

    Deltas go straight from the reader to the sink of their request, without a queue. A sink gets exactly one delta
    with `finish` set, also when the engine dies, unless its request was aborted: then it is never called again.
    """

    def __init__(
        self, address: str, folder: tempfile.TemporaryDirectory[str] | None = None, front_end: int = 0, start: int = 0
    ) -> None:
        self.ready: EngineReady
        self.stats = EngineStats()
        self.failure: str | None = None
        self.on_failure: list[Callable[[str], None]] = []
        self.on_step: list[Callable[[EngineStats], None]] = []
        self.on_stuck: list[Callable[[int], None]] = []
        """Called with the number of a front end that does not take its messages."""
        self._loop = asyncio.get_running_loop()
        self._context = open_context()
        self._socket = open_socket(self._context)
        self._socket.bind(address)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._address = address
        self._folder = folder
        self._host: EngineHost
        self._ids = request_ids(front_end, start)
        self._sinks: dict[int, Sink] = {}
        self._token_sinks: dict[int, TokenSink] = {}
        self._unsent_aborts: list[int] = []
        self._last_step = time.monotonic()
        self._started: asyncio.Future[EngineReady] = self._loop.create_future()
        self._closing = False
        self._poll: asyncio.TimerHandle | None = None
        self._exit_watch: asyncio.Task[None] | None = None

    @classmethod
    async def start_process(cls, engine: EngineProcess, args: EngineArgs, ready_timeout: float) -> Self:
        """Have an engine process serve, and wait until it can; it does not outlive the client.

        Raises `UserError`, with the engine's own sentence where it sent one, when it fails, exits or takes too long.
        """
        address, folder = private_address()
        client = cls(address, folder)
        return await client._begin(ProcessHost(engine, address, args), ready_timeout)

    @classmethod
    async def start_thread(cls, run: Callable[[EnginePort], None], ready_timeout: float) -> Self:
        """Run an engine in a daemon thread of this process, for tests and debugging; errors as in `start_process`."""
        address = f"inproc://engine-{id(run)}"
        client = cls(address)
        return await client._begin(ThreadHost(run, address, client._context), ready_timeout)

    @classmethod
    async def join(
        cls, address: str, front_end: int, start: int, engine_end: asyncio.Future[str], ready_timeout: float
    ) -> Self:
        """Share the engine of another client, which is to `attach` this address; errors as in `start_process`.

        `front_end` and `start` make the request ids unique, `engine_end` is to complete when the engine has ended.
        """
        client = cls(address, None, front_end, start)
        return await client._begin(ForeignHost(engine_end), ready_timeout)

    @property
    def open_requests(self) -> int:
        """Requests submitted that have neither ended nor been aborted."""
        return len(self._sinks)

    @property
    def process_id(self) -> int | None:
        """The engine's process, or None when it runs in a thread."""
        return self._host.process_id

    def next_id(self) -> int:
        """A request id this client has not used."""
        return next(self._ids)

    def heartbeat_age(self) -> float:
        """Seconds since the engine last sent a step or a heartbeat."""
        return time.monotonic() - self._last_step

    def announce(self) -> None:
        """Tell the engine that a request will be submitted shortly."""
        if self.failure is None:
            self._send(RequestComing())

    def submit(self, request: AddRequest | MoveAdapter, sink: Sink, token_sink: TokenSink | None = None) -> None:
        """Hand a request to the engine; `sink` gets its deltas on the event loop, never before this returns.

        Those of one token and nothing else, which nearly all are, go to `token_sink` if there is one.
        """
        self._sinks[request.request_id] = sink
        if token_sink is not None:
            self._token_sinks[request.request_id] = token_sink
        if self.failure is not None:
            self._loop.call_soon(self._end_with_error, request.request_id, ENGINE_DEAD)
        elif not self._send(request.packed() if isinstance(request, AddRequest) else request):
            self._loop.call_soon(self._end_with_error, request.request_id, ENGINE_OVERLOADED)

    def abort(self, request_ids: list[int]) -> None:
        """End requests; their sinks are not called again. Ids that ended before are ignored."""
        known = [request_id for request_id in request_ids if self._forget(request_id) is not None]
        if known and self.failure is None and not self._send(AbortRequests(known)):
            self._unsent_aborts += known

    def attach(self, front_end: int, address: str) -> None:
        """Have the engine serve another front end at `address`, in place of the one that had this number."""
        if self.failure is None and not self._send(AttachFrontEnd(front_end, address)):
            self._loop.call_later(POLL_SECONDS, self.attach, front_end, address)

    async def close(self, timeout: float) -> None:
        """Ask the engine to exit, wait up to `timeout` seconds, then kill it. Open requests end with an error.

        Another client's engine goes on.
        """
        if self._closing:
            return
        self._closing = True
        if self.failure is None and self._host.owned:
            self._send(Shutdown())
        try:
            await self._host.stop(timeout)
        finally:
            self._release()

    async def _begin(self, host: EngineHost, ready_timeout: float) -> Self:
        self._host = host
        self._loop.add_reader(self._descriptor, self._read)
        self._poll_wire()
        try:
            await host.start()
            self._exit_watch = self._loop.create_task(self._watch_exit())
            async with asyncio.timeout(ready_timeout):
                self.ready = await self._started
        except TimeoutError:
            await self.close(0.0)
            raise UserError(f"the engine was not ready within {ready_timeout:g} seconds") from None
        except BaseException as error:
            # One that has failed is about to exit; one that is still loading would not listen.
            await self.close(1.0 if isinstance(error, UserError) else 0.0)
            raise
        return self

    async def _watch_exit(self) -> None:
        how = await self._host.wait()
        self._read()
        if not self._closing:
            self._fail(EngineFailed(how))

    def _send(self, message: FrontMessage) -> bool:
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        # ZMQ's descriptor is edge-triggered and a send may use the edge up: look for messages without waiting for it.
        self._loop.call_soon(self._read)
        return True

    def _poll_wire(self) -> None:
        self._read()
        if self._unsent_aborts and self._send(AbortRequests(self._unsent_aborts)):
            self._unsent_aborts = []
        self._poll = self._loop.call_later(POLL_SECONDS, self._poll_wire)

    def _read(self) -> None:
        """Handle waiting messages, a bounded number at a time so that the event loop gets its turn."""
        if self._socket.closed:
            return
        for _ in range(MESSAGES_PER_WAKE):
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = decode_engine_message(frame)
            if message is not None:
                self._handle(message)
        self._loop.call_soon(self._read)

    def _handle(self, message: EngineMessage) -> None:
        if isinstance(message, StepOutput):
            self._last_step = time.monotonic()
            self.stats = message.stats
            for delta in message.deltas:
                if isinstance(delta, RequestDelta):
                    self._deliver(delta)
                else:
                    self._deliver_tokens(delta, self._last_step)
            for callback in self.on_step:
                callback(message.stats)
        elif isinstance(message, EngineReady):
            self._last_step = time.monotonic()
            if not self._started.done():
                self._started.set_result(message)
        elif isinstance(message, FrontEndStuck):
            for on_stuck in self.on_stuck:
                on_stuck(message.front_end)
        else:
            self._fail(message)

    def _deliver(self, delta: RequestDelta) -> None:
        if delta.finish is None:
            sink = self._sinks.get(delta.request_id)
        else:
            sink = self._forget(delta.request_id)
        if sink is None:
            return
        try:
            sink(delta)
        except Exception:
            # One request's fault must not cost the others of the step their tokens.
            logger.exception("request %d: its delta could not be handled", delta.request_id)

    def _deliver_tokens(self, deltas: TokenDeltas, at: float) -> None:
        token_sinks = self._token_sinks
        for request_id, token in deltas.pairs():
            token_sink = token_sinks.get(request_id)
            if token_sink is None:
                self._deliver(RequestDelta(request_id, [token]))
                continue
            try:
                token_sink.on_token(token, at)
            except Exception:
                logger.exception("request %d: its token could not be handled", request_id)

    def _forget(self, request_id: int) -> Sink | None:
        """No more goes to this request's sinks; returns the one for deltas, if it was not forgotten yet."""
        self._token_sinks.pop(request_id, None)
        return self._sinks.pop(request_id, None)

    def _fail(self, message: EngineFailed) -> None:
        if self.failure is not None:
            return
        self.failure = message.message
        if self._started.cancelled():
            return  # Nobody waits for this engine any more.
        if not self._started.done():
            self._started.set_exception(_start_error(message))
            return
        logger.error("the engine is gone: %s", message.message)
        self._end_all()
        for callback in self.on_failure:
            callback(message.message)

    def _end_all(self) -> None:
        for request_id in list(self._sinks):
            self._end_with_error(request_id, ENGINE_DEAD)

    def _end_with_error(self, request_id: int, error: str) -> None:
        self._deliver(RequestDelta(request_id, [], finish=FinishReason.ERROR, error=error))

    def _release(self) -> None:
        """Free sockets, descriptors and files; nothing is sent or received after this."""
        if self.failure is None:
            self.failure = "the engine was shut down"
        self._end_all()
        if self._poll is not None:
            self._poll.cancel()
        if self._exit_watch is not None:
            self._exit_watch.cancel()
        if not self._started.done():
            self._started.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)
        # A thread that would not end still uses a socket of this context, which is left as it is.
        if not self._host.alive:
            end_context(self._context)
        if self._folder is not None:
            self._folder.cleanup()


def _start_error(message: EngineFailed) -> UserError:
    error = UserError(message.message)
    error.exit_code = message.exit_code
    return error
