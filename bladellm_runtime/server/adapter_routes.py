"""The admin routes that load and unload adapters while the server runs; there are none without an admin key."""

import asyncio
import time
from collections.abc import Sequence

import orjson
from fastapi import FastAPI, Request, Response

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.request import FinishReason
from bladellm_runtime.server.cold_body import json_of
from bladellm_runtime.server.errors import ApiError, invalid_request, shown
from bladellm_runtime.server.exchange import EXCHANGE, Exchange
from bladellm_runtime.server.fields import Fields, ignored_fields
from bladellm_runtime.server.limits import RETRY_SECONDS, Failure, error_of
from bladellm_runtime.server.named_adapters import NamedAdapter
from bladellm_runtime.server.state import ServerState
from bladellm_runtime.wire.messages import MoveAdapter, RequestDelta

MAX_NAME = 256
"""Characters of a name that an adapter is given."""
MOVE_SECONDS = 300.0
"""How long an adapter may take to come to the device: it waits for a slot that no request uses."""
ACCEPTED_FIELDS = ("base_model_name", "is_3d_lora_weight")
"""Of vLLM's, without effect here."""


def add_adapter_routes(app: FastAPI, state: ServerState) -> None:
    """Add the routes to an application whose server has an admin key."""

    @app.post("/v1/load_lora_adapter")
    async def load_lora_adapter(request: Request) -> Response:
        """Give the adapter in the folder `lora_path`, below --lora_dir, the name `lora_name`, and bring it to the
        device."""
        fields = await _read_fields(state, request, ("lora_name", "lora_path"))
        name, path = _new_name(state, fields), _text(fields, "lora_path")
        if fields.boolean("load_inplace"):
            raise invalid_request("load_inplace is not supported; unload the adapter first", "load_inplace")
        folder = await _folder_below_root(state, path)
        await _load(state, folder)
        added = NamedAdapter(name, folder, int(time.time()))
        if not state.adapters.named.add(added):
            raise _name_taken(name)
        return _done(f"The adapter {shown(name)} is loaded")

    @app.post("/v1/unload_lora_adapter")
    async def unload_lora_adapter(request: Request) -> Response:
        """Take the adapter `lora_name` off the device and its name away; 409 while requests use it."""
        name = _text(await _read_fields(state, request, ("lora_name", "lora_int_id")), "lora_name")
        adapter = state.adapters.named.current().get(name)
        if adapter is None:
            raise _no_such_adapter(name)
        await _move(state, "lora_name", adapter.folder, load=False)
        if not state.adapters.named.remove(name):
            raise _no_such_adapter(name)
        return _done(f"The adapter {shown(name)} is unloaded")


async def _load(state: ServerState, folder: str) -> None:
    # What requests by path, or of before an unload, have left on the device may be older than the files.
    await _move(state, "lora_path", folder, load=False)
    await _move(state, "lora_path", folder, load=True)


async def _move(state: ServerState, param: str, folder: str, *, load: bool) -> None:
    """Have the engine load an adapter or let go of it. Raises `ApiError` with its reason, which blames `param`."""
    client = state.client
    answer: asyncio.Future[RequestDelta] = asyncio.get_running_loop().create_future()
    move = MoveAdapter(client.next_id(), folder, load)
    client.submit(move, lambda delta: None if answer.done() else answer.set_result(delta))
    try:
        async with asyncio.timeout(MOVE_SECONDS):
            delta = await answer
    except TimeoutError:
        raise ApiError(
            503,
            f"The adapter could not be moved within {MOVE_SECONDS:g} seconds; try again later",
            code="adapter_move_timeout",
            retry_after=RETRY_SECONDS,
        ) from None
    finally:
        client.abort([move.request_id])
    if delta.finish is not FinishReason.STOP:
        raise error_of(Failure(delta.error or str(delta.finish), delta.message, param))


async def _read_fields(state: ServerState, request: Request, names: Sequence[str]) -> Fields:
    """The fields of a request that may change adapters now. Raises `ApiError`."""
    exchange: Exchange = request.scope[EXCHANGE]
    state.authenticator.check_admin(exchange.header(b"authorization"))
    obstacle = state.obstacle()
    if obstacle is not None:
        raise obstacle
    fields = Fields(await json_of(state, request))
    fields.ignore((*names, *ACCEPTED_FIELDS, "load_inplace"))
    ignored_fields(fields.left_over(), state.context.strict)
    return fields


def _text(fields: Fields, name: str) -> str:
    value = fields.string(name)
    if not value:
        raise invalid_request(f"{name} is missing", name)
    return value


def _new_name(state: ServerState, fields: Fields) -> str:
    name = _text(fields, "lora_name")
    if len(name) > MAX_NAME or not name.isprintable():
        raise invalid_request(f"lora_name must have at most {MAX_NAME} printable characters", "lora_name")
    if name in state.context.model_names or name in state.adapters.named.current():
        raise _name_taken(name)
    return name


async def _folder_below_root(state: ServerState, path: str) -> str:
    """The resolved folder of a path. Raises `ApiError` 403 for one outside of --lora_dir, 404 where there is none."""
    try:
        folder = await state.adapters.folder_of(path)
    except ParameterError:
        message = f"lora_path {shown(path)} is not below --lora_dir; name a folder inside it"
        raise ApiError(403, message, param="lora_path", code="path_not_allowed") from None
    if folder is None:
        raise ApiError(404, f"There is no folder {shown(path)} below --lora_dir", param="lora_path", code="not_found")
    return str(folder)


def _name_taken(name: str) -> ApiError:
    message = f"The name {shown(name)} is taken; unload that adapter first, or choose another name"
    return ApiError(409, message, param="lora_name", code="name_taken")


def _no_such_adapter(name: str) -> ApiError:
    message = f"There is no adapter of the name {shown(name)}; GET /v1/models lists them"
    return ApiError(404, message, param="lora_name", code="adapter_not_found")


def _done(message: str) -> Response:
    return Response(orjson.dumps({"message": message}), media_type="application/json")
