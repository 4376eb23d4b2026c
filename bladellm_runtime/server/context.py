"""What a request is checked against: the served names, the engine's sizes and the model's sampling defaults."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bladellm_runtime.errors import CheckpointError, ParameterError
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.server.errors import ApiError, invalid_request


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for sampling fields that a request leaves out; the model's generation_config.json may set them."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingDefaults":
        """The sampling values of a parsed generation_config.json; missing or null ones keep their defaults.

        Raises `CheckpointError` naming the key whose value no request could use.
        """
        names = [item.name for item in dataclasses.fields(cls)]
        values = {name: config[name] for name in names if config.get(name) is not None}
        try:
            SamplingParams(**values)
        except ParameterError as error:
            raise CheckpointError(f"generation_config.json: {error}") from error
        return cls(**values)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What the parsers need to know of this server.

    `vocab_size` is the width of the logits, not the length of the tokenizer: a token id must be below it.
    `kv_tokens` is the capacity of the whole KV cache. `strict` refuses unknown fields. `adapters`: other names than
    `model_names` may be those of adapters, which the parsers do not look for.
    """

    model_names: list[str]
    max_model_len: int
    kv_tokens: int
    vocab_size: int
    strict: bool = False
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    adapters: bool = False


def check_prompt_length(prompt_len: int, ctx: RequestContext) -> int:
    """How many tokens fit behind a prompt of `prompt_len` tokens.

    Raises `ApiError` 400 `context_length_exceeded`, naming both lengths, when not even one does, and 400 for a prompt
    without tokens, behind which nothing can be generated.
    """
    if not prompt_len:
        raise invalid_request("The prompt has no tokens; send a text that the model can continue")
    if prompt_len >= ctx.max_model_len:
        raise _too_long(
            f"This model's maximum context length is {ctx.max_model_len} tokens, but the prompt has {prompt_len}; "
            "at least one must be left for the answer"
        )
    if prompt_len >= ctx.kv_tokens:
        raise _too_long(
            f"The server's KV cache holds {ctx.kv_tokens} tokens, but the prompt has {prompt_len}; "
            "at least one must be left for the answer"
        )
    return min(ctx.max_model_len, ctx.kv_tokens) - prompt_len


def fit_max_tokens(params: SamplingParams, prompt_len: int, ctx: RequestContext) -> SamplingParams:
    """`params` with max_tokens cut to the room behind the prompt, so that the answer ends with `length` there.

    Raises `ApiError` 400 `context_length_exceeded` when the prompt leaves no room at all.
    """
    room = check_prompt_length(prompt_len, ctx)
    if params.max_tokens is not None and params.max_tokens <= room:
        return params
    return dataclasses.replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))


def _too_long(message: str) -> ApiError:
    return invalid_request(message, code="context_length_exceeded")
