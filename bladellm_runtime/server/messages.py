"""The `messages` of a chat request: roles, and content that is text."""

from typing import Any

from bladellm_runtime.server.errors import ApiError, invalid_request, shown
from bladellm_runtime.server.fields import Fields, wrong_type

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles a request may use and what the chat template sees: templates know OpenAI's developer as system."""
UNSUPPORTED_ROLES = ("tool", "function")
UNSUPPORTED_KEYS = ("tool_calls", "function_call", "audio")
OPTIONAL_KEYS = ("name", "reasoning_content")


Message = dict[str, Any]


def read_messages(fields: Fields) -> list[Message]:
    """The messages, each with a role and content, and where given name and reasoning_content.

    Content is a string or a list of `{"type": "text", "text": ...}`; everything else is a string. Other keys of a
    message are dropped. Raises `ApiError` 400 naming the message and key.
    """
    value = fields.take("messages")
    if value is None:
        raise invalid_request("messages is missing", "messages")
    if not isinstance(value, list):
        raise fields.wrong_type("messages", "a list of messages", value)
    if not value:
        raise invalid_request("messages must not be empty", "messages")
    return [_read_message(f"messages[{place}]", item) for place, item in enumerate(value)]


def _read_message(name: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise wrong_type(name, "an object with role and content", message)
    for key in UNSUPPORTED_KEYS:
        if message.get(key):
            raise _unsupported(f"{name}.{key}")
    role = _read_role(f"{name}.role", message.get("role"))
    checked: Message = {"role": role, "content": _read_content(f"{name}.content", message.get("content"))}
    for key in OPTIONAL_KEYS:
        value = message.get(key)
        if value is None:
            continue
        if not isinstance(value, str):
            raise wrong_type(f"{name}.{key}", "a string", value)
        checked[key] = value
    return checked


def _read_role(name: str, role: Any) -> str:
    if isinstance(role, str) and role in ROLES:
        return ROLES[role]
    if role in UNSUPPORTED_ROLES:
        raise _unsupported(name, f"{name} {role} is not supported yet")
    raise wrong_type(name, f"one of {', '.join(ROLES)}", role)


def _read_content(name: str, content: Any) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong_type(name, "a string or a list of text parts", content)
    return [_read_part(f"{name}[{place}]", part) for place, part in enumerate(content)]


def _read_part(name: str, part: Any) -> dict[str, str]:
    if not isinstance(part, dict):
        raise wrong_type(name, "an object with type and text", part)
    kind = part.get("type")
    if kind != "text":
        raise _unsupported(f"{name}.type", f"{name} is of type {shown(kind)}, but this model takes text only")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong_type(f"{name}.text", "a string", text)
    return {"type": "text", "text": text}


def _unsupported(name: str, message: str | None = None) -> ApiError:
    return invalid_request(message or f"{name} is not supported yet; leave it out", name, "unsupported_field")
