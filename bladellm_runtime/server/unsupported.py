"""Request fields that must act or be refused: dropping one silently would give a different kind of answer."""

from collections.abc import Mapping
from typing import Any

from bladellm_runtime.guided.constraint import FIELDS as GUIDED_FIELDS
from bladellm_runtime.server.errors import ApiError, invalid_request
from bladellm_runtime.server.fields import Fields

BOOKKEEPING_FIELDS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
        "prediction",
        "web_search_options",
        "parallel_tool_calls",
        "beam_width",
    }
)
"""Accepted and without effect: bookkeeping of OpenAI's own service, and options of things refused elsewhere.

`prompt_cache_key` only says which requests to send to the same server; what keeps cached prompts apart is `cache_salt`.
"""

CONSTRAINT_FIELDS = (
    "structured_outputs",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "logits_processors",
    "bad_words",
    "allowed_token_ids",
    "suffix",
    "prompt_embeds",
    "documents",
    "audio",
    "tools",
    "functions",
    "use_beam_search",
)
"""Refused unless null, false or an empty list or object."""


def refuse_unsupported(body: Mapping[str, Any], fields: Fields) -> None:
    """Mark the fields of this module as known and accept those without effect.

    Raises `ApiError` 400, code `unsupported_field`, naming the first one that asks for something not built.
    """
    fields.ignore(BOOKKEEPING_FIELDS)
    for name in body:
        if name.startswith("guided_") and name not in GUIDED_FIELDS and fields.given(name):
            raise _unsupported(name)
    for name in CONSTRAINT_FIELDS:
        value = fields.take(name)
        if value is not None and value is not False and value not in ([], {}):
            raise _unsupported(name)
    if fields.given("chat_template"):
        raise invalid_request(
            "chat_template in a request is not accepted; start the server with --chat_template FILE",
            "chat_template",
            "unsupported_field",
        )
    _check_tool_choice(fields)
    _check_modalities(fields)


def _check_tool_choice(fields: Fields) -> None:
    for name in ("tool_choice", "function_call"):
        if fields.take(name) not in (None, "none", "auto"):
            raise _unsupported(name)


def _check_modalities(fields: Fields) -> None:
    if fields.take("modalities") not in (None, ["text"]):
        raise _unsupported("modalities", 'modalities other than ["text"] are not supported')


def _unsupported(name: str, message: str | None = None) -> ApiError:
    return invalid_request(message or f"{name[:64]} is not supported yet; leave it out", name[:64], "unsupported_field")
