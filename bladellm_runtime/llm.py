"""`LLM`: the engine as a Python object, for files of prompts, notebooks and tests. No server, no second process."""

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import build_engine
from bladellm_runtime.engine.device import on_gpu
from bladellm_runtime.errors import ParameterError, UserError
from bladellm_runtime.garbage import objects_kept
from bladellm_runtime.guided.constraint import constraint_of
from bladellm_runtime.models.folder import read_vocab_size
from bladellm_runtime.models.hub import resolve_model
from bladellm_runtime.request import Constraint, FinishReason, SamplingParams, check_cache_salt
from bladellm_runtime.text.stream import TextDelta, TextStream
from bladellm_runtime.text.tokenizer import Tokenizer, check_text
from bladellm_runtime.wire.messages import AddRequest, Delta, EngineStats, TokenLogprobs, one_by_one

PREPARING_SECONDS = 0.001
"""How long to leave the processor to threads that compile constraints and load adapters, before looking whether they
are done."""

QUEUED_TOKENS = 32_768
"""Prompt tokens that wait in the engine, at least, while there are more: four full steps. Making the requests of
others, tokenizing above all, falls into the time of steps then."""

OFFLINE_REQUESTS = 512
"""Twice as many as by default: on an H200 11,400 tokens/s of Llama-3.1-8B (512 in, 256 out), not 11,000."""


@dataclass(slots=True)
class Completion:
    """One choice: its text, token ids (the end-of-text token included) and why it ended. message: what there is to say
    of an `error`, in a sentence."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    message: str | None = None


@dataclass(slots=True)
class GenerateOutput:
    """The `n` choices of one prompt. cached_tokens: how many of the prompt's tokens the prompt cache had before."""

    prompt: str | list[int]
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int = 0


@dataclass(slots=True)
class _Call:
    """A call of `generate`: what all its requests have, what is still to be asked for, and the requests under way."""

    salt: str
    constraint: Constraint | None
    asked: deque[tuple[str | list[int], SamplingParams, str]]
    requests: set[int] = field(default_factory=set)
    waiting: int = 0
    """Prompt tokens of requests of which nothing has come yet."""


@dataclass(slots=True)
class _Choice:
    """waiting: tokens of its prompt, until something of it has come."""

    call: _Call
    stream: TextStream
    output: GenerateOutput
    completion: Completion
    waiting: int


def offline_args(model: str, options: dict[str, Any]) -> EngineArgs:
    """The flags of an engine in which nobody waits for a token, only for the last one.

    Steps are as full as they can be, unless a `target_tbt_ms` is given. On a GPU `OFFLINE_REQUESTS` run at once, unless
    `max_running_requests` is given, and steps of as many rows are captured, unless a flag says of which.
    """
    args = EngineArgs(model=model, **options)
    if args.target_tbt_ms is None:
        args = replace(args, target_tbt_ms=0.0)
    if on_gpu(args.device) and args.max_running_requests is None:
        args = replace(args, max_running_requests=OFFLINE_REQUESTS)
        if not args.cuda_graph_batch_sizes and not args.cuda_graph_max_batch_size and not args.disable_cuda_graph:
            args = replace(args, cuda_graph_max_batch_size=OFFLINE_REQUESTS)
    return args


class LLM:
    """An engine in this process. `options` are the fields of `EngineArgs`, as the command line spells them, with the
    defaults of `offline_args`.

    Use it as a context manager, or call `close()`, to give the memory back.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.args = offline_args(model, options)
        folder = resolve_model(self.args.model)
        self.tokenizer = Tokenizer.load(Path(self.args.tokenizer_dir) if self.args.tokenizer_dir else folder)
        if self.args.load_format != "dummy":
            self.tokenizer.check_vocabulary(read_vocab_size(folder))
        self._engine = build_engine(replace(self.args, model=str(folder)))
        self.ready = self._engine.ready
        self._next_id = 0
        self._choices: dict[int, _Choice] = {}

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        lora: str | Path | Sequence[str | Path | None] | None = None,
        guided_json: dict[str, Any] | str | None = None,
        guided_regex: str | None = None,
        guided_choice: Sequence[str] | None = None,
        guided_grammar: str | None = None,
    ) -> list[GenerateOutput]:
        """Complete every prompt (text or token ids); one `SamplingParams` for all, or one each.

        One of the `guided_` arguments makes every answer satisfy a JSON schema, a regular expression, or a grammar in
        Lark, or be one of several strings; a constraint that cannot be used is the `error` of the completions.
        `lora` is the folder of a LoRA adapter in PEFT's format, one for all or one each, None for the base model alone;
        it needs `enable_lora`, and an adapter that cannot be loaded is the `error` of its completions.
        Without a seed each request draws one. Cached prompts are shared only among calls with the same `cache_salt`.
        Raises `ParameterError` for a prompt that is neither text nor token ids, before anything is run; one that is
        empty or too long is the `error` of its completions.
        """
        guided = {"guided_json": guided_json, "guided_regex": guided_regex, "guided_grammar": guided_grammar}
        call = self._call(prompts, params, cache_salt, lora, guided | {"guided_choice": guided_choice})
        # A walk through all that torch has made takes as long as several steps.
        with objects_kept():
            return list(self._answer(call))

    def generate_each(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str | None = None,
        lora: str | Path | Sequence[str | Path | None] | None = None,
    ) -> Iterator[GenerateOutput]:
        """As `generate`, one output after the other, each when it and those before it are complete. What has not been
        asked for when the iterator is closed is given up."""
        return self._answer(self._call(prompts, params, cache_salt, lora, {}))

    def _call(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        cache_salt: str | None,
        lora: str | Path | Sequence[str | Path | None] | None,
        guided: dict[str, Any],
    ) -> _Call:
        """What is asked for, checked."""
        salt = "" if cache_salt is None else check_cache_salt(cache_salt)
        choice = guided.get("guided_choice")
        constraint = constraint_of(guided | {"guided_choice": None if choice is None else list(choice)})
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ParameterError(f"{len(prompts)} prompts need as many SamplingParams, got {len(each)}")
        adapters = [lora] * len(prompts) if lora is None or isinstance(lora, str | Path) else list(lora)
        if len(adapters) != len(prompts):
            raise ParameterError(f"{len(prompts)} prompts need as many adapters in lora, got {len(adapters)}")
        return _Call(salt, constraint, deque(zip(map(_checked, prompts), each, map(_resolved, adapters), strict=True)))

    def _answer(self, call: _Call) -> Iterator[GenerateOutput]:
        """The outputs of a call, in order. Its requests are made beside steps, when few are left that wait."""
        line: deque[GenerateOutput] = deque()
        try:
            while call.asked or line:
                while call.asked and call.waiting < QUEUED_TOKENS:
                    line.append(self._add(call, *call.asked.popleft()))
                while line and all(completion.finish_reason is not None for completion in line[0].outputs):
                    yield line.popleft()
                if call.requests:
                    if self._engine.core.preparing:
                        time.sleep(PREPARING_SECONDS)
                    self._dispatch(self._engine.core.step())
        finally:
            # Whatever stopped the call: the next one must not go on with its requests.
            self._engine.core.abort(list(call.requests))
            for request_id in call.requests:
                self._choices.pop(request_id, None)

    def _add(self, call: _Call, prompt: str | list[int], params: SamplingParams, adapter: str) -> GenerateOutput:
        """Make the requests of a prompt."""
        seeded = params if params.seed is not None else replace(params, seed=secrets.randbits(63))
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        output = GenerateOutput(prompt, ids, [])
        for choice in range(params.n):
            self._next_id += 1
            arrival = time.monotonic()
            request = AddRequest(self._next_id, ids, seeded, choice, arrival, call.salt, call.constraint, adapter)
            completion = Completion(logprobs=None if params.logprobs is None else [])
            output.outputs.append(completion)
            stream = TextStream(self.tokenizer, request)
            self._choices[self._next_id] = _Choice(call, stream, output, completion, len(ids))
            call.requests.add(self._next_id)
            call.waiting += len(ids)
            self._dispatch(self._engine.core.add(request))
        return output

    def _dispatch(self, deltas: Sequence[Delta]) -> None:
        """Hand what has come to the calls that wait for it."""
        for delta in one_by_one(deltas):
            choice = self._choices.get(delta.request_id)
            if choice is None:
                continue
            call = choice.call
            if choice.waiting:
                call.waiting, choice.waiting = call.waiting - choice.waiting, 0
            if delta.prompt_logprobs is not None:
                choice.output.prompt_logprobs = delta.prompt_logprobs
            # The other choices of a prompt find in the cache what the first has computed.
            if delta.cached_tokens is not None and choice.completion is choice.output.outputs[0]:
                choice.output.cached_tokens = delta.cached_tokens
            text = choice.stream.feed(delta)
            _extend(choice.completion, text)
            choice.completion.message = delta.message
            if text.finish is not None:
                del self._choices[delta.request_id]
                call.requests.discard(delta.request_id)
                if choice.stream.stopped_early:
                    self._engine.core.abort([delta.request_id])

    def stats(self) -> EngineStats:
        """A reading of the engine's counters."""
        return self._engine.core.stats(time.monotonic())

    def close(self) -> None:
        """Give the memory back; the object cannot be used afterwards."""
        self._engine.core.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(prompt: str | list[int]) -> str | list[int]:
    """A prompt that can be made a request. Raises `ParameterError`."""
    if isinstance(prompt, str):
        return check_text(prompt, "prompt")
    try:
        return [index(token) for token in prompt]
    except TypeError:
        raise ParameterError("each prompt must be a string or a list of token ids", "prompt") from None


def _resolved(adapter: str | Path | None) -> str:
    return "" if adapter is None else str(Path(adapter).resolve())


def _extend(completion: Completion, delta: TextDelta) -> None:
    completion.text += delta.text
    completion.token_ids += delta.tokens
    if delta.logprobs is not None and completion.logprobs is not None:
        completion.logprobs += delta.logprobs
    if delta.finish is not None:
        completion.finish_reason = delta.finish
        completion.stop_reason = delta.stop_reason
        completion.error = delta.error


__all__ = ["LLM", "Completion", "GenerateOutput", "SamplingParams", "UserError"]
