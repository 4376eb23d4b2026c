"""The messages on the wire: msgspec structs in msgpack, one engine message a step carrying all its tokens.

Times are `time.monotonic()` seconds, which the processes of one host share. Every `AddRequest` is answered by
deltas of which exactly one, the last, has `finish` set.

A request's id begins with the number of the front end that sent it, which is where its deltas go.
"""

import itertools
from array import array
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.structs import replace

from bladellm_runtime.request import Constraint, FinishReason, SamplingParams

FRONT_END_SHIFT = 48
START_SHIFT = 36


def request_ids(front_end: int, start: int) -> Iterator[int]:
    """Ids that no other front end uses, nor this one after another of its starts, which are counted from 0."""
    return itertools.count((front_end << FRONT_END_SHIFT) + (start << START_SHIFT) + 1)


def front_end_of(request_id: int) -> int:
    """The number of the front end that sent the request."""
    return request_id >> FRONT_END_SHIFT


class AddRequest(msgspec.Struct, tag="add", frozen=True, array_like=True):
    """One choice of one prompt. `choice` with the seed keys its random numbers; `params.n` is not read here. prompt:
    its tokens, or these as int32, one behind the other as memory has them.

    Requests with different `cache_salt` never share cached prompts. adapter: the key of a LoRA adapter, the resolved
    path of its folder; empty for the base model.
    """

    request_id: int
    prompt: bytes | list[int]
    params: SamplingParams
    choice: int
    arrival: float
    cache_salt: str = ""
    constraint: Constraint | None = None
    adapter: str = ""

    def packed(self) -> "AddRequest":
        """The same with its tokens as int32, which whoever decodes it need not look at one by one: 131,072 take the
        engine 11 ms else. Unchanged where one of them is no int32; the engine refuses that."""
        try:
            return self if isinstance(self.prompt, bytes) else replace(self, prompt=array("i", self.prompt).tobytes())
        except OverflowError:
            return self


class MoveAdapter(msgspec.Struct, tag="adapter", frozen=True, array_like=True):
    """Bring a LoRA adapter to the device ahead of its first request, or let go of it, so that its folder is read anew.

    Answered by one terminal delta of `request_id`, like a request.
    """

    request_id: int
    adapter: str
    load: bool


class AbortRequests(msgspec.Struct, tag="abort", frozen=True, array_like=True):
    """End these requests within one step; ids that already ended are ignored."""

    request_ids: list[int]


class AttachFrontEnd(msgspec.Struct, tag="attach", frozen=True, array_like=True):
    """From the first front end: serve another one at `address`. Requests of the one before it of this number end."""

    front_end: int
    address: str


class RequestComing(msgspec.Struct, tag="coming", frozen=True, array_like=True):
    """A front end has a request's head: a step about to be planned had better wait for it."""


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True, array_like=True):
    """Finish the step in flight, release everything and exit."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: index 0 is the token itself, the rest are the most likely, best first."""

    token_ids: list[int]
    logprobs: list[float]


class RequestDelta(msgspec.Struct, tag=0, array_like=True, gc=False):
    """What one step did for one request.

    `finish` set ends the request. `error` is a short code (`invalid_logits`, `context_length_exceeded`, ...) with
    `finish == ERROR`, and `message` a sentence for the client where the code does not say it all. `scheduled_at` is set
    once, on the delta of the first token, and so is `cached_tokens`: how many prompt tokens the prompt cache had.
    `prompt_logprobs` has one entry a prompt token from the second on, and comes once, with the first delta.
    """

    request_id: int
    tokens: list[int]
    finish: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    scheduled_at: float | None = None
    cached_tokens: int | None = None
    message: str | None = None


class TokenDeltas(msgspec.Struct, tag=1, frozen=True, array_like=True, gc=False):
    """One more token for each of many requests, and nothing else: int64 each, of this machine's byte order, side by
    side."""

    request_ids: bytes
    tokens: bytes

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> "TokenDeltas":
        """From request id and token of each; some."""
        request_ids, tokens = zip(*pairs, strict=True)
        return cls(array("q", request_ids).tobytes(), array("q", tokens).tobytes())

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Request id and token of each. Raises `ValueError` where there are not as many of both, or not whole ones."""
        return zip(_integers(self.request_ids), _integers(self.tokens), strict=True)


Delta = RequestDelta | TokenDeltas


def one_by_one(deltas: Iterable[Delta]) -> Iterator[RequestDelta]:
    """What steps did, as one delta a request and step."""
    for delta in deltas:
        if isinstance(delta, RequestDelta):
            yield delta
        else:
            for request_id, token in delta.pairs():
                yield RequestDelta(request_id, [token])


def _integers(packed: bytes) -> "array[int]":
    numbers = array("q")
    numbers.frombytes(packed)
    return numbers


class EngineStats(msgspec.Struct, array_like=True):
    """A reading of the engine's state; counters count from the engine's start.

    Granules: `kv_granules_used` by live requests, `kv_granules_cached` by the prompt cache alone, `kv_granules_shared`
    saved by sharing (users of a granule beyond its first, summed). `kv_tokens_unused`: tokens for which live requests
    hold room they have not written to, the internal waste. `kv_maps` counts mapping calls, `kv_map_p99` is the 99th
    percentile of their recent durations and `kv_map_wait` how long steps waited for them, in seconds.
    `kernel_compiles_after_ready`: kernels compiled, or loaded from a cache on disk, that the start should have seen to.
    Of constraints: `guided_hits` were found compiled or being compiled, `guided_misses` were not, `guided_refused`
    requests were refused for theirs; `guided_compile_seconds` were spent compiling in the background, and what is kept
    takes `guided_cache_bytes`. `guided_masks` rows of token masks took the engine `guided_mask_seconds`.
    Of LoRA adapters: `lora_slots` there are, `lora_used` of them by adapters of live requests, for which `lora_waiting`
    requests wait; `lora_loads` came to a slot, `lora_evictions` lost theirs to another one, and `lora_load_seconds`
    were spent between asking for one and having it, summed.
    `late`: of the `waiting`, those whose first token cannot be in time.
    """

    time: float = 0.0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    kv_granules_used: int = 0
    kv_granules: int = 0
    granule_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    kv_granules_cached: int = 0
    kv_granules_shared: int = 0
    kv_tokens_unused: int = 0
    kv_granules_swapped: int = 0
    kv_maps: int = 0
    kv_map_p99: float = 0.0
    kv_map_wait: float = 0.0
    kernel_compiles_after_ready: int = 0
    guided_hits: int = 0
    guided_misses: int = 0
    guided_refused: int = 0
    guided_compile_seconds: float = 0.0
    guided_cache_bytes: int = 0
    guided_mask_seconds: float = 0.0
    guided_masks: int = 0
    lora_slots: int = 0
    lora_used: int = 0
    lora_waiting: int = 0
    lora_loads: int = 0
    lora_evictions: int = 0
    lora_load_seconds: float = 0.0
    late: int = 0


class StepOutput(msgspec.Struct, tag="step", array_like=True):
    """All deltas of a step, those of one request in their order. An idle engine sends one without deltas as its
    heartbeat."""

    deltas: list[Delta]
    stats: EngineStats


class EngineReady(msgspec.Struct, tag="ready", frozen=True, array_like=True):
    """The engine can serve. `memory` (name, bytes), `phases` (name, seconds) and `kv_cache` are for the banner."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int
    eos_token_ids: list[int]
    device: str
    dtype: str
    memory: list[tuple[str, int]]
    phases: list[tuple[str, float]]
    kv_cache: str = ""


class EngineFailed(msgspec.Struct, tag="failed", frozen=True, array_like=True):
    """The engine could not start, or stopped for good. `message` is one sentence for the user."""

    message: str
    exit_code: int = 1


class FrontEndStuck(msgspec.Struct, tag="stuck", frozen=True, array_like=True):
    """To the first front end: another one no longer takes its messages, which are dropped until it is replaced."""

    front_end: int


FrontMessage = AddRequest | RequestComing | MoveAdapter | AbortRequests | AttachFrontEnd | Shutdown
EngineMessage = StepOutput | EngineReady | EngineFailed | FrontEndStuck
