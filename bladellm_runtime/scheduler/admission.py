"""From an `AddRequest` to a `Sequence`, or to the reason why it can never run."""

from array import array

import numpy as np

from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.prepared import Prepared
from bladellm_runtime.scheduler.sequence import Sequence
from bladellm_runtime.wire.messages import AddRequest

INVALID_REQUEST = "invalid_request"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


def kv_capacity(spec: KvSpec) -> int:
    """Tokens the longest sequence can keep in the KV cache when it has the whole arena for itself."""
    return min(spec.max_tokens, spec.num_granules * spec.granule_tokens)


def refusal(tokens: "array[int] | None", limits: SchedulerLimits, capacity: int) -> str | None:
    """The error code of a prompt that can never run, else None. tokens: as of `tokens_of`."""
    if not tokens:
        return INVALID_REQUEST
    if len(tokens) + 1 > limits.max_model_len or len(tokens) > capacity:
        return CONTEXT_LENGTH_EXCEEDED
    return None


def tokens_of(prompt: bytes | list[int], vocab_size: int) -> "array[int] | None":
    """The prompt of a request as int32, once for all who read it: looking at each of 8,192 numbers takes 0.2 ms. None
    where one is no token."""
    tokens = array("i")
    try:
        tokens.frombytes(prompt) if isinstance(prompt, bytes) else tokens.extend(prompt)
    except (OverflowError, ValueError):
        return None
    ids = np.frombuffer(tokens, np.int32)
    return tokens if not len(ids) or (ids.min() >= 0 and ids.max() < vocab_size) else None


def answer_tokens(prompt_len: int, max_tokens: int | None, limits: SchedulerLimits, capacity: int) -> int:
    """`max_tokens` clamped to the model length and the arena; the last token needs no KV, as nothing follows it."""
    room = min(limits.max_model_len - prompt_len, capacity - prompt_len + 1)
    return room if max_tokens is None else min(max_tokens, room)


def cache_key(salt: str, weights: str) -> str:
    """What keeps apart whose prompts may be shared. A salt is printable ASCII: none of a client's is another one's
    together with weights. Neither has a NUL within."""
    return f"{salt}\0{weights}" if weights else salt


def make_sequence(
    request: AddRequest,
    tokens: "array[int]",
    order: int,
    limits: SchedulerLimits,
    capacity: int,
    prepared: Prepared,
) -> Sequence:
    """The sequence of a request that `refusal` lets pass; tokens: its prompt, which the sequence appends to. `order` is
    its place in the line."""
    params, prompt_len = request.params, len(tokens)
    answer = answer_tokens(prompt_len, params.max_tokens, limits, capacity)
    stops = frozenset() if params.ignore_eos else limits.eos_token_ids
    return Sequence(
        order=order,
        request_id=request.request_id,
        params=params,
        choice=request.choice,
        known=tokens,
        prompt_len=prompt_len,
        max_len=prompt_len + answer,
        kv_end=prompt_len + max(answer, 1) - 1,
        salt=cache_key(request.cache_salt, prepared.weights),
        stops=stops.union(params.stop_token_ids) if params.stop_token_ids else stops,
        prepared=prepared,
        arrived=request.arrival,
    )
