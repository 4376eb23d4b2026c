"""`POST /v1/completions`: the request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bladellm_runtime.request import MAX_LOGPROBS, Constraint, SamplingParams
from bladellm_runtime.server.constraints import read_constraint
from bladellm_runtime.server.context import RequestContext, check_prompt_length
from bladellm_runtime.server.errors import ApiError, invalid_request, shown
from bladellm_runtime.server.fields import Fields, ignored_fields
from bladellm_runtime.server.sampling import (
    check_token_id,
    read_cache_salt,
    read_max_tokens,
    read_model,
    read_sampling,
    read_stream,
    read_top_logprobs,
)
from bladellm_runtime.server.unsupported import refuse_unsupported

MAX_PROMPTS = 64
DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


@dataclass(frozen=True, slots=True)
class CompletionCall:
    """A checked completion request.

    Choice `c` of prompt `p` has the index `p * params.n + c` in the answer. `params.max_tokens` may still exceed the
    room behind a prompt: `fit_max_tokens` cuts it once the prompt's length is known. With `echo` the answer starts
    with the prompt, and only then max_tokens may be 0.
    """

    model: str
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool
    include_usage: bool
    continuous_usage: bool
    cache_salt: str
    constraint: Constraint | None
    echo: bool
    ignored_fields: tuple[str, ...]


def parse_completion(body: Mapping[str, Any], ctx: RequestContext) -> CompletionCall:
    """Check a completion request. Raises `ApiError` 400, or 404 for an unknown model."""
    fields = Fields(body)
    refuse_unsupported(body, fields)
    model = read_model(fields, ctx)
    stream, unknown_options = read_stream(fields)
    echo = fields.boolean("echo")
    logprobs = _read_logprobs(fields)
    params = read_sampling(
        fields,
        ctx,
        max_tokens=read_max_tokens(fields, DEFAULT_MAX_TOKENS, least=0 if echo else 1),
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo else None,
    )
    return CompletionCall(
        model=model,
        prompts=read_prompts(fields, ctx),
        params=params,
        stream=stream.stream,
        include_usage=stream.include_usage,
        continuous_usage=stream.continuous_usage,
        cache_salt=read_cache_salt(fields),
        constraint=read_constraint(body, fields, params),
        echo=echo,
        ignored_fields=ignored_fields(fields.left_over() + unknown_options, ctx.strict),
    )


def read_prompts(fields: Fields, ctx: RequestContext) -> list[Prompt]:
    """`prompt` in its four shapes (string, strings, token ids, lists of token ids) as a list of prompts.

    Raises `ApiError` 400 for more than `MAX_PROMPTS` of them, an empty one (there is nothing to continue), a wrong
    type or a token id the model does not have.
    """
    value = fields.take("prompt")
    if value is None:
        raise invalid_request("prompt is missing", "prompt")
    if isinstance(value, str) or _is_token_ids(value):
        return [_checked_prompt("prompt", value, ctx)]
    if not isinstance(value, list):
        raise _wrong_prompt("prompt", value)
    if not 0 < len(value) <= MAX_PROMPTS:
        raise invalid_request(f"prompt must have 1 to {MAX_PROMPTS} entries, got {len(value)}", "prompt")
    return [_checked_prompt(f"prompt[{place}]", item, ctx) for place, item in enumerate(value)]


def _is_token_ids(value: Any) -> bool:
    """Whether a list is meant as one prompt in token ids, good or bad: it starts with neither a string nor a list."""
    return isinstance(value, list) and bool(value) and not isinstance(value[0], str | list)


def _checked_prompt(name: str, prompt: Any, ctx: RequestContext) -> Prompt:
    if not isinstance(prompt, str | list):
        raise _wrong_prompt(name, prompt)
    if not prompt:
        raise invalid_request(f"{name} must not be empty", name)
    if isinstance(prompt, list):
        _check_token_ids(name, prompt, ctx)
    return prompt


def _check_token_ids(name: str, tokens: list[Any], ctx: RequestContext) -> None:
    # The length first: it bounds the work of everything after it.
    check_prompt_length(len(tokens), ctx)
    if set(map(type, tokens)) != {int}:
        place, wrong = next((place, item) for place, item in enumerate(tokens) if type(item) is not int)
        raise invalid_request(f"{name}[{place}] must be an integer, got {shown(wrong)}", f"{name}[{place}]")
    check_token_id(name, min(tokens), ctx)
    check_token_id(name, max(tokens), ctx)


def _wrong_prompt(name: str, value: Any) -> ApiError:
    return invalid_request(f"{name} must be a string or a list of token ids, got {shown(value)}", name)


def _read_logprobs(fields: Fields) -> int | None:
    """OpenAI's integer (how many alternatives), or BladeLLM's boolean with `top_logprobs` beside it."""
    value = fields.take("logprobs")
    if value is None or isinstance(value, bool):
        return read_top_logprobs(fields, logprobs=bool(value))
    count = fields.integer("logprobs")
    if count is None or not 0 <= count <= MAX_LOGPROBS:
        raise invalid_request(f"logprobs must be between 0 and {MAX_LOGPROBS}, got {shown(value)}", "logprobs")
    read_top_logprobs(fields, logprobs=True)
    return count
