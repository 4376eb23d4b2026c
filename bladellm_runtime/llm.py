"""`LLM`: the engine as a Python object, for files of prompts, notebooks and tests. No server, no second process."""

import secrets
import time
from collections.abc import Sequence
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
from bladellm_runtime.request import Constraint, FinishReason, SamplingParams, check_cache_salt
from bladellm_runtime.text.stream import TextDelta, TextStream
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_runtime.wire.messages import AddRequest, Delta, EngineStats, TokenLogprobs, one_by_one

PREPARING_SECONDS = 0.001
"""How long to leave the processor to threads that compile constraints and load adapters, before looking whether they
are done."""

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
class _Choice:
    stream: TextStream
    output: GenerateOutput
    completion: Completion


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
        self._engine = build_engine(self.args)
        self.ready = self._engine.ready
        folder = Path(self.args.tokenizer_dir) if self.args.tokenizer_dir else self._engine.folder
        self.tokenizer = Tokenizer.load(folder)
        if self.args.load_format != "dummy":
            self.tokenizer.check_vocabulary(self.ready.vocab_size)
        self._next_id = 0

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
        salt = "" if cache_salt is None else check_cache_salt(cache_salt)
        choice = None if guided_choice is None else list(guided_choice)
        given = {"guided_json": guided_json, "guided_regex": guided_regex, "guided_grammar": guided_grammar}
        constraint = constraint_of(given | {"guided_choice": choice})
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ParameterError(f"{len(prompts)} prompts need as many SamplingParams, got {len(each)}")
        adapters = [lora] * len(prompts) if lora is None or isinstance(lora, str | Path) else list(lora)
        if len(adapters) != len(prompts):
            raise ParameterError(f"{len(prompts)} prompts need as many adapters in lora, got {len(adapters)}")
        ids = [self._token_ids(prompt) for prompt in prompts]
        outputs = [GenerateOutput(prompt, tokens, []) for prompt, tokens in zip(prompts, ids, strict=True)]
        choices: dict[int, _Choice] = {}
        try:
            # A walk through all that torch has made takes as long as several steps.
            with objects_kept():
                for one in zip(outputs, each, map(_resolved, adapters), strict=True):
                    self._add(*one, salt, constraint, choices)
                self._run(choices)
        except BaseException:
            # Whatever stopped the call: the next one must not go on with its requests.
            self._engine.core.abort(list(choices))
            raise
        return outputs

    def _run(self, choices: dict[int, _Choice]) -> None:
        """Step until all choices have ended."""
        while choices:
            if self._engine.core.preparing:
                time.sleep(PREPARING_SECONDS)
            self._dispatch(self._engine.core.step(), choices)

    def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        try:
            return [index(token) for token in prompt]
        except TypeError:
            raise ParameterError("each prompt must be a string or a list of token ids", "prompt") from None

    def _add(
        self,
        output: GenerateOutput,
        params: SamplingParams,
        adapter: str,
        salt: str,
        constraint: Constraint | None,
        choices: dict[int, _Choice],
    ) -> None:
        seeded = params if params.seed is not None else replace(params, seed=secrets.randbits(63))
        ids = output.prompt_token_ids
        for choice in range(params.n):
            self._next_id += 1
            request = AddRequest(self._next_id, ids, seeded, choice, time.monotonic(), salt, constraint, adapter)
            completion = Completion(logprobs=None if params.logprobs is None else [])
            output.outputs.append(completion)
            choices[self._next_id] = _Choice(TextStream(self.tokenizer, request), output, completion)
            self._dispatch(self._engine.core.add(request), choices)

    def _dispatch(self, deltas: Sequence[Delta], choices: dict[int, _Choice]) -> None:
        for delta in one_by_one(deltas):
            choice = choices.get(delta.request_id)
            if choice is None:
                continue
            if delta.prompt_logprobs is not None:
                choice.output.prompt_logprobs = delta.prompt_logprobs
            # The other choices of a prompt find in the cache what the first has computed.
            if delta.cached_tokens is not None and choice.completion is choice.output.outputs[0]:
                choice.output.cached_tokens = delta.cached_tokens
            text = choice.stream.feed(delta)
            _extend(choice.completion, text)
            choice.completion.message = delta.message
            if text.finish is not None:
                del choices[delta.request_id]
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
