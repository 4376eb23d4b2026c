"""The body of a request to a cold route."""

from typing import Any

from fastapi import Request

from bladellm_runtime.server.body import parse_body
from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.exchange import EXCHANGE, ClientGone, Exchange
from bladellm_runtime.server.generate import read_body
from bladellm_runtime.server.state import ServerState


async def json_of(state: ServerState, request: Request) -> dict[str, Any]:
    """The JSON object that a request carries, within the server's limits. Raises `ApiError`."""
    exchange: Exchange = request.scope[EXCHANGE]
    exchange.check_json()
    try:
        return parse_body(await read_body(state, exchange))
    except ClientGone:
        raise ApiError(400, "The client closed the connection") from None
