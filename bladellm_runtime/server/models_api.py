"""`GET /v1/models` and `GET /v1/models/{name}`."""

from collections.abc import Sequence
from typing import Any

import orjson

from bladellm_runtime.server.adapters import Adapters
from bladellm_runtime.server.errors import model_not_found

OWNER = "bladellm"


def models_list(names: Sequence[str], created: int, adapters: Adapters) -> bytes:
    """The body that lists the model's names, and after them the adapters that have names."""
    return orjson.dumps({"object": "list", "data": list(_cards(names, created, adapters).values())})


def model_card(name: str, names: Sequence[str], created: int, adapters: Adapters) -> bytes:
    """The body for one name. Raises `ApiError` 404 for one that is not listed."""
    card = _cards(names, created, adapters).get(name)
    if card is None:
        raise model_not_found(name)
    return orjson.dumps(card)


def _cards(names: Sequence[str], created: int, adapters: Adapters) -> dict[str, dict[str, Any]]:
    cards = {name: _card(name, created) for name in names}
    for adapter in adapters.named.current().values():
        links = {"root": adapters.root_of(adapter.folder), "parent": names[0]}
        cards[adapter.name] = _card(adapter.name, adapter.created) | links
    return cards


def _card(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": OWNER}
