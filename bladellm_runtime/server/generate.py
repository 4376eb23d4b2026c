"""`POST /v1/chat/completions` and `/v1/completions` over raw ASGI: a request's way from its bytes to its answer."""

import asyncio
import contextlib
import dataclasses
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic, time
from typing import Any

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.server.answer import Heading, answer_stream, answer_whole
from bladellm_runtime.server.body import parse_body
from bladellm_runtime.server.chat import ChatCall, parse_chat
from bladellm_runtime.server.completions import CompletionCall, Prompt, parse_completion
from bladellm_runtime.server.context import RequestContext, fit_max_tokens
from bladellm_runtime.server.errors import ApiError, from_parameter_error, internal_error
from bladellm_runtime.server.exchange import ClientGone, Exchange
from bladellm_runtime.server.generation import Generation, PromptWork
from bladellm_runtime.server.limits import unavailable
from bladellm_runtime.server.state import ServerState
from bladellm_runtime.text.pool import PoolBusyError

logger = logging.getLogger(__name__)

Call = ChatCall | CompletionCall
Parser = Callable[[dict[str, Any], RequestContext], Call]
PARSERS: dict[str, Parser] = {"/v1/chat/completions": parse_chat, "/v1/completions": parse_completion}
ANNOUNCED_BYTES = 2**15
"""Of a body, at most, that the engine is told of before it is read: of a longer one it would wait in vain."""


async def generate(state: ServerState, exchange: Exchange, parser: Parser) -> None:
    """Answer a request to one of the two routes; every outcome but a vanished client is sent as an answer."""
    try:
        await _generate(state, exchange, parser)
    except ClientGone:
        state.metrics.disconnects += 1
    except ApiError as error:
        await _refuse(state, exchange, error)
    except ParameterError as error:
        state.metrics.rejected["400"] += 1
        await exchange.fail(from_parameter_error(error))
    except PoolBusyError:
        await _refuse(state, exchange, unavailable("tokenizer_busy"))
    except asyncio.CancelledError:
        # Only a server that ends cancels its handlers.
        await exchange.cut_short(unavailable("server_shutting_down"))
    except Exception:
        await fail_unexpectedly(exchange)


async def _refuse(state: ServerState, exchange: Exchange, error: ApiError) -> None:
    state.metrics.rejected[error.code or str(error.status)] += 1
    await exchange.fail(error)


async def fail_unexpectedly(exchange: Exchange) -> None:
    """Log the exception being handled; tell the client no more than that there was one."""
    logger.exception("request %s failed", exchange.request_id.decode())
    if exchange.started:
        exchange.drop()
    else:
        await exchange.fail(internal_error())


async def _generate(state: ServerState, exchange: Exchange, parser: Parser) -> None:
    arrival = monotonic()
    if exchange.scope["method"] != "POST":
        raise ApiError(405, "This route takes POST only")
    obstacle = state.obstacle()
    if obstacle is not None:
        raise obstacle
    exchange.check_json()
    # Before the body is read: a server that is full must not spend memory on more bodies.
    state.admission.check_room()
    declared = exchange.declared_bytes
    if declared is not None and declared <= ANNOUNCED_BYTES:
        state.client.announce()
    call = parser(parse_body(await read_body(state, exchange)), state.context)
    prompts = call.prompts if isinstance(call, CompletionCall) else [call]
    choices = len(prompts) * call.params.n
    state.admission.enter(choices)
    try:
        async with _unless_client_leaves(exchange) as client:
            await _answer(state, exchange, call, arrival, client)
    finally:
        state.admission.leave(choices)


async def _answer(state: ServerState, exchange: Exchange, call: Call, arrival: float, client: "_ClientWatch") -> None:
    adapter = await state.adapters.find(call.model)
    work = await prepare(state, call)
    client.check()
    state.metrics.choices.observe(call.params.n)
    # Tokenizing takes a while, and things may have changed meanwhile.
    obstacle = state.obstacle()
    if obstacle is not None:
        raise obstacle
    generation = Generation(state, work, adapter, arrival, exchange.drop)
    heading = Heading.of(call, int(time()))
    try:
        generation.submit()
        if call.stream:
            # A task of its own resumes without going through the coroutines of all its callers.
            await asyncio.create_task(answer_stream(exchange, generation, heading))
        else:
            await answer_whole(exchange, generation, heading)
    finally:
        generation.close()


async def read_body(state: ServerState, exchange: Exchange) -> bytes:
    """The request's body within the server's limits."""
    return await exchange.read_body(state.max_body_bytes, state.args.header_timeout)


async def prepare(state: ServerState, call: Call) -> list[PromptWork]:
    """Tokenize every prompt of a call, off the event loop, and cut max_tokens to the room behind it."""
    params = seeded(call.params)
    if isinstance(call, ChatCall):
        tokens = await tokenize_chat(state, call)
        fitted = fit_max_tokens(params, len(tokens), state.context)
        return [PromptWork(tokens, fitted, cache_salt=call.cache_salt, constraint=call.constraint)]
    return [await _prepare_prompt(state, prompt, params, call) for prompt in call.prompts]


async def tokenize_chat(state: ServerState, call: ChatCall) -> list[int]:
    """The prompt that the messages make with the model's chat template."""
    return await state.pool.render_chat(
        state.tokenizer,
        call.messages,
        add_generation_prompt=call.add_generation_prompt,
        continue_final_message=call.continue_final_message,
        resume_response=call.resume_response,
        template_kwargs=call.chat_template_kwargs,
    )


def seeded(params: SamplingParams) -> SamplingParams:
    """`params` with a seed; one that the client left out is drawn, and shared by all choices of the request."""
    if params.seed is not None:
        return params
    return dataclasses.replace(params, seed=secrets.randbits(63))


async def _prepare_prompt(
    state: ServerState, prompt: Prompt, params: SamplingParams, call: CompletionCall
) -> PromptWork:
    if isinstance(prompt, str):
        tokens = await state.pool.encode(state.tokenizer, prompt)
        text = prompt
    else:
        tokens = prompt
        skip = params.skip_special_tokens
        text = await state.pool.run("prompt", state.tokenizer.decode, prompt, skip) if call.echo else ""
    fitted = fit_max_tokens(params, len(tokens), state.context)
    return PromptWork(tokens, fitted, text if call.echo else None, call.cache_salt, call.constraint)


class _ClientWatch:
    """Whether the client is still there."""

    gone = False

    def check(self) -> None:
        """Raise `ClientGone` if it is not: `asyncio.wait_for` of Python 3.11 may swallow a cancellation."""
        if self.gone:
            raise ClientGone


@asynccontextmanager
async def _unless_client_leaves(exchange: Exchange) -> AsyncIterator[_ClientWatch]:
    """Run the block, but cancel it as soon as the client closes the connection; that raises `ClientGone`."""
    block = asyncio.current_task()
    client = _ClientWatch()

    async def watch() -> None:
        await exchange.wait_disconnect()
        # The end of an answer reads like a disconnect, too.
        client.gone = not exchange.ended
        if client.gone and block is not None:
            block.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield client
    except asyncio.CancelledError:
        if not client.gone or block is None:
            raise
        block.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher
