"""A server's life: bind, start the engine and other front ends, serve, drain on a signal, end with the engine."""

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import uvicorn
import uvloop

from bladellm_runtime.config import ServingArgs
from bladellm_runtime.errors import UserError
from bladellm_runtime.garbage import keep_objects
from bladellm_runtime.models.folder import read_vocab_size
from bladellm_runtime.server.acceptor import Acceptor
from bladellm_runtime.server.adapters import make_adapters
from bladellm_runtime.server.app import create_app
from bladellm_runtime.server.front_ends import FrontEnds
from bladellm_runtime.server.generation import expire
from bladellm_runtime.server.keys import read_admin_keys, read_api_keys
from bladellm_runtime.server.listener import allow_descriptors, bind, protocol_class, url_of
from bladellm_runtime.server.place import Place
from bladellm_runtime.server.state import ServerState, make_state, served_names
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.client import EngineClient
from bladellm_runtime.wire.engine_process import EngineProcess
from bladellm_runtime.wire.signals import STOP_SIGNALS
from bladellm_runtime.wire.transport import EnginePort

logger = logging.getLogger(__name__)

ENGINE_START_SECONDS = 3600.0
ENGINE_STOP_SECONDS = 10.0
EXPIRE_SECONDS = 0.1
FLUSH_SECONDS = 1.0
"""Seconds that last events get to leave, at the end of a drain."""
FRONT_END_EXIT_SECONDS = 3.0
"""How much longer than its requests another front end may take to exit."""
DEAD_ENGINE_SECONDS = 3.0
"""How long a server whose engine died goes on answering 503, so that probes and clients learn of it."""

OnReady = Callable[[str, EngineClient], None]


def serve(
    args: ServingArgs,
    model_folder: Path,
    *,
    on_ready: OnReady | None = None,
    engine: EngineProcess | None = None,
) -> int:
    """Serve the model in `model_folder` until SIGTERM, SIGINT or the engine's end; returns the exit code.

    0 after a signal: the first one makes `/ready` answer 503 and refuses new requests, running ones may finish within
    --shutdown_timeout; the second one ends them at once. 1 when the engine died. `on_ready` gets the URL and the
    engine's client; engine: as `engine_process` gives it. Raises `UserError` when the server cannot start, a signal
    during the start included.
    """
    # What it would refuse is refused before the engine loads anything.
    make_adapters(args, served_names(args), None).close()
    read_api_keys(args)
    read_admin_keys(args)
    listener = bind(args.host, args.port)
    try:
        allow_descriptors(args.max_connections)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve_first(args, model_folder, listener, on_ready, engine))
    finally:
        listener.close()


async def _serve_first(
    args: ServingArgs,
    model_folder: Path,
    listener: socket.socket,
    on_ready: OnReady | None,
    engine: EngineProcess | None,
) -> int:
    """Run the first front end, with all that is its to start."""
    front_ends = FrontEnds(args, model_folder, listener, args.frontend_processes)
    return await FirstServer(args, model_folder, listener, engine, front_ends).run(on_ready)


class Server:
    """One run of a front end on a bound socket, with the engine of `_start_engine`."""

    def __init__(self, args: ServingArgs, model_folder: Path, listener: socket.socket, place: Place) -> None:
        self._args = dataclasses.replace(args, model=str(model_folder))
        self._names = args.served_model_name or [args.model]
        self._folder = model_folder
        self._listener = listener
        self._place = place
        self._stops = 0
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._engine_died = asyncio.Event()

    async def run(self, on_ready: OnReady | None) -> int:
        """Start, serve and stop; returns the exit code."""
        with self._handle_signals():
            client, tokenizer = await self._start()
            try:
                args = dataclasses.replace(self._args, served_model_name=self._names)
                state = make_state(args, self._folder, client, tokenizer, self._place)
                client.on_failure.append(lambda _: self._engine_died.set())
                return await self._serve(state, on_ready)
            finally:
                stuck = client.heartbeat_age() > self._args.engine_timeout
                await client.close(0.0 if stuck else ENGINE_STOP_SECONDS)

    def stop(self) -> None:
        """Finish the open requests and end; a second call ends them at once."""
        self._stops += 1
        self._stop.set()
        if self._stops > 1:
            self._hurry.set()

    async def _start(self) -> tuple[EngineClient, Tokenizer]:
        """Start the engine and load the tokenizer, side by side; a signal ends both."""
        starting = asyncio.ensure_future(self._load())
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError, UserError):
                client, _ = await starting
                await client.close(1.0)
            raise _Interrupted("stopped by a signal before the model was loaded")
        return starting.result()

    async def _load(self) -> tuple[EngineClient, Tokenizer]:
        engine = asyncio.create_task(self._start_engine())
        try:
            tokenizer = await asyncio.to_thread(self._load_tokenizer)
            return await engine, tokenizer
        except BaseException:
            engine.cancel()
            with contextlib.suppress(asyncio.CancelledError, UserError):
                await (await engine).close(1.0)
            raise

    def _load_tokenizer(self) -> Tokenizer:
        """One that fits the model: what does not is said before the engine has loaded its weights."""
        folder = Path(self._args.tokenizer_dir) if self._args.tokenizer_dir else self._folder
        template = Path(self._args.chat_template) if self._args.chat_template else None
        tokenizer = Tokenizer.load(folder, template)
        if self._args.load_format != "dummy":
            tokenizer.check_vocabulary(read_vocab_size(self._folder))
        return tokenizer

    async def _start_engine(self) -> EngineClient:
        """A client of an engine that is ready."""
        raise NotImplementedError

    async def _serve(self, state: ServerState, on_ready: OnReady | None) -> int:
        server = _QuietServer(_uvicorn_config(state))
        alone = self._place.front_ends == 1
        http = asyncio.create_task(server.serve([self._listener] if alone else []))
        housekeeping = asyncio.create_task(_expire_forever(state))
        keep_objects()
        while not server.started and not http.done():
            await asyncio.sleep(0.01)
        acceptor = None if alone else Acceptor(self._listener, self._place.counts.connections, server.protocol)
        if on_ready is not None and server.started:
            on_ready(url_of(self._listener), state.client)
        code = await self._until_end(state, http)
        housekeeping.cancel()
        if acceptor is not None:
            acceptor.close()
        server.should_exit = True
        await http
        state.pool.close()
        state.adapters.close()
        return code

    async def _until_end(self, state: ServerState, http: "asyncio.Task[None]") -> int:
        """Wait for a signal or the engine's death, and end the open requests as that demands."""
        await _first_of(self._stop.wait(), self._engine_died.wait(), asyncio.shield(http))
        if self._engine_died.is_set():
            await _first_of(asyncio.sleep(DEAD_ENGINE_SECONDS), self._hurry.wait())
            return 1
        state.draining = True
        if state.admission.open:
            logger.info("finishing the open requests (%d); a second signal ends them at once", state.admission.open)
        drained = asyncio.create_task(_until_idle(state))
        await _first_of(
            drained, asyncio.sleep(self._args.shutdown_timeout), self._hurry.wait(), self._engine_died.wait()
        )
        state.end_all("server_shutting_down")
        await _first_of(_until_idle(state), asyncio.sleep(FLUSH_SECONDS))
        for generation in list(state.generations):
            generation.give_up_reader()
        return 1 if self._engine_died.is_set() else 0

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        # Not by the loop's own handlers: where those are removed, a signal ends the process for a moment.
        before = {
            number: signal.signal(number, lambda *_: loop.call_soon_threadsafe(self.stop)) for number in STOP_SIGNALS
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                # After one, another says nothing new, and must not cut short what is left: other processes, files.
                signal.signal(number, signal.SIG_IGN if self._stops else handler)


class FirstServer(Server):
    """The front end that starts the engine and the other front ends, and ends them."""

    def __init__(
        self,
        args: ServingArgs,
        model_folder: Path,
        listener: socket.socket,
        engine: EngineProcess | None,
        front_ends: FrontEnds,
    ) -> None:
        super().__init__(args, model_folder, listener, front_ends.place)
        self._engine = engine
        self._front_ends = front_ends

    async def run(self, on_ready: OnReady | None) -> int:
        """As every server; the other front ends do not outlive it."""
        try:
            return await super().run(on_ready)
        finally:
            await self._front_ends.close(0.0)

    def stop(self) -> None:
        """As every server, and so do the others."""
        super().stop()
        self._front_ends.stop()

    async def _start_engine(self) -> EngineClient:
        await self._front_ends.start()
        client = await self._front_ends.unless_one_ends(self._start_own_engine())
        try:
            await self._front_ends.attach(client)
        except BaseException:
            await client.close(1.0)
            raise
        return client

    async def _start_own_engine(self) -> EngineClient:
        if self._engine is not None:
            return await EngineClient.start_process(self._engine, self._args, ENGINE_START_SECONDS)
        from bladellm_runtime.engine.process import run_engine

        def run(port: EnginePort) -> None:
            run_engine(port, self._args)

        return await EngineClient.start_thread(run, ENGINE_START_SECONDS)

    async def _serve(self, state: ServerState, on_ready: OnReady | None) -> int:
        code = await super()._serve(state, on_ready)
        # They were told to stop at the same time, or the engine died for them too.
        grace = self._args.shutdown_timeout + FLUSH_SECONDS if not self._engine_died.is_set() else 0.0
        await self._front_ends.close(grace + FRONT_END_EXIT_SECONDS)
        return code


class _Interrupted(UserError):
    exit_code = 130


class _QuietServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    def protocol(self) -> asyncio.Protocol:
        """What serves one connection."""
        make: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return make(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


def _uvicorn_config(state: ServerState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        http=protocol_class(state.args, state.place.counts.connections),
        ws="none",
        loop="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        log_level="error",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        # Between two requests a client is as slow as one that does not send its headers.
        timeout_keep_alive=state.args.header_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )


async def _expire_forever(state: ServerState) -> None:
    while True:
        await asyncio.sleep(EXPIRE_SECONDS)
        expire(state)
        state.publish_metrics()


async def _until_idle(state: ServerState) -> None:
    while state.admission.open:
        await asyncio.sleep(0.02)


async def _first_of(*waits: Awaitable[object]) -> None:
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
