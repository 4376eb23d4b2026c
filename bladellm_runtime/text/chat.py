"""Chat messages to prompt tokens: check the messages, render the model's template, tokenize.

Special tokens come from the template only: their text inside a message, a tool description or any other string of the
request is ordinary text (see `special_tokens`).
"""

import re
from collections.abc import Mapping
from typing import Any

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.text.special_tokens import SpecialTokenGuard
from bladellm_runtime.text.template import ChatTemplate
from bladellm_runtime.text.tokenizer import Tokenizer, check_text

MAX_NESTING = 64
_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_RESERVED = frozenset({"messages", "add_generation_prompt"})
_END = "\U000fffff "
"""Put after the message to continue. Its space tells whether the template trims content."""


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    resume_response: str | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """Token ids of the prompt that `messages` make with the tokenizer's chat template.

    `messages` are objects in the OpenAI form: `role`, and `content` as a string, None or a list of text parts; other
    keys reach the template as they are, None values do not. `add_generation_prompt` opens the assistant's turn;
    `continue_final_message` instead leaves the last message open. `resume_response` is the beginning of the answer:
    it follows the rendered prompt. `template_kwargs` are further template variables, such as `tools`.

    `ParameterError` for messages the template refuses or cannot render within its limits, for a tokenizer without a
    template, and for text that is not UTF-8.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ParameterError(
            "the model has no chat template; use /v1/completions or start with --chat_template", "messages"
        )
    if continue_final_message and add_generation_prompt:
        raise ParameterError("continue_final_message needs add_generation_prompt=false", "continue_final_message")
    guard = tokenizer.guard
    _check_messages(messages)
    keep_parts = template.reads_content_parts
    chat = [_message(message, index, guard, keep_parts) for index, message in enumerate(messages)]
    if continue_final_message:
        _mark_end(chat[-1])
    variables: dict[str, Any] = {"tools": None, "documents": None, **tokenizer.named_tokens}
    variables |= _template_kwargs(template_kwargs or {}, guard)
    variables |= {"messages": chat, "add_generation_prompt": add_generation_prompt}
    text = _render(template, variables)
    if continue_final_message:
        text = _cut_at_end(text)
    if resume_response is not None:
        text += guard.mark(check_text(resume_response, "resume_response"))
    if guard.is_marked(text):
        return guard.encode(text)
    return tokenizer.encode(text, add_special_tokens=False, param="messages")


def _render(template: ChatTemplate, variables: Mapping[str, Any]) -> str:
    try:
        return template.render(variables)
    except Exception as error:  # the template is a program of the model's authors: it may raise anything
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ParameterError(f"the chat template cannot render these messages: {reason}", "messages") from None


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise ParameterError("messages must be a list of at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ParameterError(f"messages[{index}] must be an object with role and content", "messages")


def _message(message: dict[str, Any], index: int, guard: SpecialTokenGuard, keep_parts: bool) -> dict[str, Any]:
    """The message as the template sees it: checked, marked, without None values."""
    role = message.get("role")
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise ParameterError(f"messages[{index}].role must be 1 to 64 letters, digits, '_', '.' or '-'", "messages")
    known = {key: value for key, value in message.items() if value is not None}
    if "content" in known:
        known["content"] = _content(known["content"], index, keep_parts)
    marked: dict[str, Any] = _marked(known, guard, "messages")
    return marked


def _content(content: object, index: int, keep_parts: bool) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ParameterError(f"messages[{index}].content must be a string or a list of parts", "messages")
    texts = [_part_text(part, index) for part in content]
    return [{"type": "text", "text": text} for text in texts] if keep_parts else "\n".join(texts)


def _part_text(part: object, index: int) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise ParameterError(f'messages[{index}].content takes parts {{"type": "text", "text": ...}} only', "messages")
    text: str = part["text"]
    return text


def _template_kwargs(given: object, guard: SpecialTokenGuard) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise ParameterError("chat_template_kwargs must be an object", "chat_template_kwargs")
    reserved = sorted(_RESERVED & given.keys())
    if reserved:
        raise ParameterError(f"chat_template_kwargs cannot set {reserved[0]}", "chat_template_kwargs")
    marked: dict[str, Any] = _marked(given, guard, "chat_template_kwargs")
    return marked


def _marked(value: Any, guard: SpecialTokenGuard, param: str, depth: int = 0) -> Any:
    """A copy of a JSON value with every string checked and marked."""
    if isinstance(value, str):
        return guard.mark(check_text(value, param))
    if value is None or isinstance(value, bool | int | float):
        return value
    if depth >= MAX_NESTING:
        raise ParameterError(f"{param} is nested more than {MAX_NESTING} levels deep", param)
    if isinstance(value, dict):
        return {_marked(key, guard, param): _marked(item, guard, param, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item, guard, param, depth + 1) for item in value]
    raise ParameterError(f"{param} has a value of type {type(value).__name__}; use JSON values", param)


def _mark_end(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1]["text"] += _END
    elif isinstance(content, str):
        message["content"] = content + _END
    else:
        raise ParameterError("continue_final_message needs a last message with content", "continue_final_message")


def _cut_at_end(text: str) -> str:
    """The rendered text up to the end of the last message's content."""
    before, found, after = text.rpartition(_END[0])
    if not found:
        raise ParameterError("the chat template drops the message to continue", "continue_final_message")
    return before if after.startswith(_END[1:]) else before.rstrip()
