"""The fields that completions and chat share: model, sampling, stopping, streaming, caching."""

import re
from dataclasses import dataclass

from bladellm_runtime.errors import ParameterError
from bladellm_runtime.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    SamplingParams,
    check_cache_salt,
)
from bladellm_runtime.server.context import RequestContext
from bladellm_runtime.server.errors import from_parameter_error, invalid_request, model_not_found, shown
from bladellm_runtime.server.fields import Fields, as_number

_TOKEN_KEY = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Whether and how to stream. `continuous_usage` puts the usage so far on every chunk."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


def read_model(fields: Fields, ctx: RequestContext) -> str:
    """The name the request asks for; the first one of the model when it leaves `model` out.

    Raises `ApiError` 404 for others than the model's, where they cannot be those of adapters.
    """
    name = fields.string("model")
    if name is None:
        return ctx.model_names[0]
    if name not in ctx.model_names and not ctx.adapters:
        raise model_not_found(name)
    return name


def read_stream(fields: Fields) -> tuple[StreamOptions, list[str]]:
    """The streaming options and the names of unknown ones."""
    stream = fields.switch("stream")
    given = fields.object("stream_options")
    if given is None:
        return StreamOptions(stream), []
    if not stream:
        raise invalid_request("stream_options is only allowed with stream: true", "stream_options")
    options = Fields(given, "stream_options.")
    options.ignore(("include_obfuscation",))
    include_usage = options.boolean("include_usage")
    continuous = options.boolean("continuous_usage_stats")
    return StreamOptions(stream, include_usage, include_usage and continuous), options.left_over()


def read_cache_salt(fields: Fields) -> str:
    """Prompts are found in the prompt cache only by requests with the same salt; empty when it is left out.

    Raises `ApiError` 400.
    """
    value = fields.take("cache_salt")
    if value is None:
        return ""
    try:
        return check_cache_salt(value)
    except ParameterError as error:
        raise from_parameter_error(error) from None


def read_sampling(
    fields: Fields,
    ctx: RequestContext,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The sampling parameters, with the model's defaults for what the request leaves out.

    `max_tokens`, `logprobs` and `prompt_logprobs` are read by the caller: their meaning differs by route.
    Raises `ApiError` 400 naming the field.
    """
    defaults = ctx.defaults
    # First of all, because everything below is work that n would multiply.
    n = _integer(fields, "n", 1)
    try:
        params = SamplingParams(
            n=n,
            max_tokens=max_tokens,
            min_tokens=_integer(fields, "min_tokens", 0),
            temperature=_number(fields, "temperature", defaults.temperature),
            top_k=_top_k(fields, ctx),
            top_p=_number(fields, "top_p", defaults.top_p),
            min_p=_number(fields, "min_p", defaults.min_p),
            repetition_penalty=_number(fields, "repetition_penalty", defaults.repetition_penalty),
            presence_penalty=_number(fields, "presence_penalty", 0.0),
            frequency_penalty=_number(fields, "frequency_penalty", 0.0),
            logit_bias=_logit_bias(fields, ctx),
            seed=fields.integer("seed"),
            stop=_stop(fields),
            stop_token_ids=_stop_token_ids(fields, ctx),
            include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
            ignore_eos=fields.boolean("ignore_eos"),
            skip_special_tokens=fields.boolean("skip_special_tokens", True),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    except ParameterError as error:
        raise from_parameter_error(error) from None
    _check_best_of(fields, n)
    return params


def read_max_tokens(fields: Fields, default: int | None, *, least: int = 1) -> int | None:
    """max_completion_tokens, else max_tokens, else `default`. Raises `ApiError` 400 below `least`."""
    chosen = default
    for name in ("max_tokens", "max_completion_tokens"):
        value = fields.integer(name)
        if value is None:
            continue
        if not least <= value <= 2**31:
            raise invalid_request(f"{name} must be between {least} and {2**31}, got {shown(value)}", name)
        chosen = value
    return chosen


def read_top_logprobs(fields: Fields, *, logprobs: bool) -> int | None:
    """How many alternatives to return at each position; None without `logprobs`. Raises `ApiError` 400."""
    top = _integer(fields, "top_logprobs", 0)
    if not 0 <= top <= MAX_LOGPROBS:
        raise invalid_request(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {shown(top)}", "top_logprobs")
    if top and not logprobs:
        raise invalid_request("top_logprobs is only allowed with logprobs: true", "top_logprobs")
    return top if logprobs else None


def _integer(fields: Fields, name: str, default: int) -> int:
    value = fields.integer(name)
    return default if value is None else value


def _number(fields: Fields, name: str, default: float) -> float:
    value = fields.number(name)
    return default if value is None else value


def _top_k(fields: Fields, ctx: RequestContext) -> int:
    top_k = _integer(fields, "top_k", ctx.defaults.top_k)
    return 0 if top_k == -1 else min(top_k, ctx.vocab_size)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise fields.wrong_type("stop", "a string or a list of strings", value)
    if len(value) > MAX_STOP_STRINGS:
        raise invalid_request(f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(value)}", "stop")
    for place, item in enumerate(value):
        if not isinstance(item, str):
            raise fields.wrong_type(f"stop[{place}]", "a string", item)
    return tuple(value)


def _stop_token_ids(fields: Fields, ctx: RequestContext) -> tuple[int, ...]:
    """`stop_token_ids` and BladeLLM's `stop_tokens`, which mean the same, together."""
    found: dict[int, None] = {}
    for name in ("stop_tokens", "stop_token_ids"):
        for token in fields.integers(name, MAX_STOP_TOKENS):
            check_token_id(name, token, ctx)
            found[token] = None
    return tuple(found)


def _logit_bias(fields: Fields, ctx: RequestContext) -> dict[int, float]:
    given = fields.object("logit_bias") or {}
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid_request(f"logit_bias takes at most {MAX_LOGIT_BIAS} entries, got {len(given)}", "logit_bias")
    return {_bias_token(key, ctx): as_number("logit_bias", bias) for key, bias in given.items()}


def _bias_token(key: str | int, ctx: RequestContext) -> int:
    if isinstance(key, str):
        if not _TOKEN_KEY.fullmatch(key):
            raise invalid_request(f"logit_bias has the key {shown(key)}; keys must be token ids", "logit_bias")
        key = int(key)
    check_token_id("logit_bias", key, ctx)
    return key


def check_token_id(name: str, token: int, ctx: RequestContext) -> None:
    """Raise `ApiError` 400 for a token id that the model's logits do not have."""
    if not 0 <= token < ctx.vocab_size:
        raise invalid_request(
            f"{name} has the token id {shown(token)}, but ids run from 0 to {ctx.vocab_size - 1}", name
        )


def _check_best_of(fields: Fields, n: int) -> None:
    best_of = fields.integer("best_of")
    if best_of is not None and best_of != n:
        raise invalid_request(
            f"best_of {shown(best_of)} is not supported; leave it out or set it to n ({n})", "best_of"
        )
