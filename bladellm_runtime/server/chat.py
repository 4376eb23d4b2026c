"""`POST /v1/chat/completions`: the request."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bladellm_runtime.request import Constraint, SamplingParams
from bladellm_runtime.server.constraints import read_constraint
from bladellm_runtime.server.context import RequestContext
from bladellm_runtime.server.errors import invalid_request, shown
from bladellm_runtime.server.fields import Fields, ignored_fields, wrong_type
from bladellm_runtime.server.messages import Message, read_messages
from bladellm_runtime.server.sampling import (
    read_cache_salt,
    read_max_tokens,
    read_model,
    read_sampling,
    read_stream,
    read_top_logprobs,
)
from bladellm_runtime.server.unsupported import refuse_unsupported

MAX_TEMPLATE_KWARGS = 32
MAX_TEMPLATE_STRING = 1024
TEMPLATE_INTERNALS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "raise_exception",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "strftime_now",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names that chat_template_kwargs may not set: arguments of the rendering call and helpers inside templates."""
_TEMPLATE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")

TemplateValue = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked chat request.

    `messages` have a role, content (a string or text parts), and where given name and reasoning_content.
    `params.max_tokens` None means all the room behind the prompt: `fit_max_tokens` fills it in once the prompt's
    length is known. `resume_response` is text to put after the templated prompt, for the answer to continue.
    """

    model: str
    messages: list[Message]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str
    constraint: Constraint | None
    resume_response: str | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, TemplateValue]
    ignored_fields: tuple[str, ...]


def parse_chat(body: Mapping[str, Any], ctx: RequestContext) -> ChatCall:
    """Check a chat request. Raises `ApiError` 400, or 404 for an unknown model."""
    fields = Fields(body)
    refuse_unsupported(body, fields)
    model = read_model(fields, ctx)
    stream, unknown_options = read_stream(fields)
    logprobs = read_top_logprobs(fields, logprobs=fields.boolean("logprobs"))
    params = read_sampling(fields, ctx, max_tokens=read_max_tokens(fields, None), logprobs=logprobs)
    messages = read_messages(fields)
    add_generation_prompt, continue_final_message = _read_ending(fields, messages)
    resume_response = fields.string("resume_response")
    if resume_response is not None and continue_final_message:
        raise invalid_request("resume_response and continue_final_message exclude each other", "resume_response")
    return ChatCall(
        model=model,
        messages=messages,
        params=params,
        stream=stream.stream,
        include_usage=stream.include_usage,
        continuous_usage=stream.continuous_usage,
        cache_salt=read_cache_salt(fields),
        constraint=read_constraint(body, fields, params),
        resume_response=resume_response,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        chat_template_kwargs=_read_template_kwargs(fields),
        ignored_fields=ignored_fields(fields.left_over() + unknown_options, ctx.strict),
    )


def _read_ending(fields: Fields, messages: list[Message]) -> tuple[bool, bool]:
    """(add_generation_prompt, continue_final_message): how the templated prompt ends."""
    continue_final = fields.boolean("continue_final_message")
    add_prompt = fields.boolean("add_generation_prompt", not continue_final)
    if continue_final and add_prompt:
        raise invalid_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if continue_final and messages[-1]["role"] != "assistant":
        raise invalid_request(
            "continue_final_message needs an assistant message at the end of messages", "continue_final_message"
        )
    return add_prompt, continue_final


def _read_template_kwargs(fields: Fields) -> dict[str, TemplateValue]:
    """`chat_template_kwargs`: variables for the chat template, scalars only."""
    given = fields.object("chat_template_kwargs") or {}
    if len(given) > MAX_TEMPLATE_KWARGS:
        raise invalid_request(f"chat_template_kwargs takes at most {MAX_TEMPLATE_KWARGS} names", "chat_template_kwargs")
    for name, value in given.items():
        _check_template_kwarg(name, value)
    return given


def _check_template_kwarg(name: str, value: Any) -> None:
    # Special tokens are the tokenizer's: a request must not redefine bos_token and the like.
    if not _TEMPLATE_NAME.fullmatch(name) or name in TEMPLATE_INTERNALS or name.endswith(("_token", "_tokens")):
        raise invalid_request(f"chat_template_kwargs may not set {shown(name)}", "chat_template_kwargs")
    if not isinstance(value, str | int | float | bool | None):
        raise wrong_type(f"chat_template_kwargs.{name}", "a string, a number, true, false or null", value)
    if isinstance(value, str) and len(value) > MAX_TEMPLATE_STRING:
        raise invalid_request(
            f"chat_template_kwargs.{name} must have at most {MAX_TEMPLATE_STRING} characters", "chat_template_kwargs"
        )
