"""`GET /v1/models` and `GET /v1/models/{name}`."""

from collections.abc import Sequence
from typing import Any

import orjson

from bladellm_runtime.server.errors import model_not_found

OWNER = "bladellm"


def models_list(names: Sequence[str], created: int) -> bytes:
    """The body that lists every name requests may use."""
    return orjson.dumps({"object": "list", "data": [_card(name, created) for name in names]})


def model_card(name: str, names: Sequence[str], created: int) -> bytes:
    """The body for one name. Raises `ApiError` 404 for one this server does not answer to."""
    if name not in names:
        raise model_not_found(name)
    return orjson.dumps(_card(name, created))


def _card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}
