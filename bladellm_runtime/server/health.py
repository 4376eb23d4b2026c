"""What the probes report: `/health` whether the engine works, `/ready` whether new requests are welcome."""

from typing import Literal

from bladellm_runtime.server.errors import ApiError
from bladellm_runtime.server.limits import unavailable
from bladellm_runtime.wire.client import EngineClient

EngineCondition = Literal["ok", "engine_stuck", "engine_dead"]


def engine_condition(client: EngineClient, timeout: float) -> EngineCondition:
    """Dead once the engine has failed or exited; stuck when no step or heartbeat came for `timeout` seconds."""
    if client.failure is not None:
        return "engine_dead"
    return "engine_stuck" if client.heartbeat_age() > timeout else "ok"


def obstacle(client: EngineClient, timeout: float, *, draining: bool) -> ApiError | None:
    """Why a new request cannot be taken, as a 503; None when it can."""
    condition = engine_condition(client, timeout)
    if condition != "ok":
        return unavailable(condition)
    return unavailable("server_shutting_down") if draining else None
