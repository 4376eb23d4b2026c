"""The server as one ASGI application: keys first, then the two hot routes here and the rest through FastAPI."""

import asyncio

from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.exchange import EXCHANGE, Exchange, Message, Receive, Scope, Send
from bladellm_runtime.server.generate import PARSERS, fail_unexpectedly, generate
from bladellm_runtime.server.limits import unavailable
from bladellm_runtime.server.state import ServerState


class App:
    """Answers HTTP requests. Paths are compared exactly, as the client wrote them apart from %-escapes."""

    def __init__(self, state: ServerState) -> None:
        # FastAPI takes a third of a second to import, and only a server needs it.
        from bladellm_runtime.server.routes import cold_routes

        self._state = state
        self._cold = cold_routes(state)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] != "http":
            return
        try:
            await self._answer(Exchange(scope, receive, send))
        finally:
            # They refer back to the request, which is freed at once without them.
            scope.pop("extensions", None)

    async def _answer(self, exchange: Exchange) -> None:
        path = exchange.scope["path"]
        try:
            self._state.authenticator.check(path, exchange.header(b"authorization"))
        except ApiError as error:
            self._state.metrics.rejected["unauthorized"] += 1
            await exchange.fail(error)
            return
        parser = PARSERS.get(path)
        if parser is not None:
            await generate(self._state, exchange, parser)
        else:
            await self._answer_cold(exchange)

    async def _answer_cold(self, exchange: Exchange) -> None:
        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.started = True
                message["headers"] = [*message.get("headers", []), *exchange.own_headers()]
                await exchange.send(message)
            elif message.get("more_body"):
                await exchange.send(message)
            else:
                await exchange.end(message.get("body", b""))

        exchange.scope[EXCHANGE] = exchange
        try:
            await self._cold(exchange.scope, exchange.receive, send)
        except asyncio.CancelledError:
            await exchange.cut_short(unavailable("server_shutting_down"))
        except Exception:
            await fail_unexpectedly(exchange)


def create_app(state: ServerState) -> App:
    """The application of a server whose engine is ready."""
    return App(state)
