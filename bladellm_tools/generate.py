"""`blade_llm generate`: answer a file of prompts with an engine in this process."""

import contextlib
import dataclasses
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from bladellm_runtime import LLM
from bladellm_runtime.config import EngineArgs
from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.garbage import objects_kept
from bladellm_runtime.llm import Completion, GenerateOutput
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import EngineStats, TokenLogprobs
from bladellm_tools.console import fail, is_terminal
from bladellm_tools.generate_args import GenerateArgs
from bladellm_tools.prompts import Output, PromptLine, check_apart, read_prompts

REASONS = {
    "invalid_request": "the prompt is empty, or has token ids that the model lacks; mend it",
    "context_length_exceeded": "the prompt does not fit into --max_model_len or the KV cache; shorten it",
    "invalid_logits": "the model computed logits that are not numbers; try --dtype float32, or download it again",
}
"""Why a prompt was not answered, by the engine's codes that come without a sentence."""


def run(args: GenerateArgs, engine: EngineArgs) -> int:
    """Read, generate, write. Returns 1 when a prompt could not be answered, else 0."""
    if not engine.model:
        raise ConfigError("--model is missing; give a model folder or a hub id")
    params = sampling_params(args)
    prompts = read_prompts(args.input, args.input_format)
    check_apart(args.input, args.output)
    with Output(args.output) as file, LLM(**dataclasses.asdict(engine)) as llm:
        started, before = time.monotonic(), llm.stats()
        with progress(llm, len(prompts) * params.n):
            failures = answer(llm, prompts, params, file)
        report(before, llm.stats(), len(prompts), time.monotonic() - started)
    for line, error in failures[:1]:
        fail(f"{len(failures)} of {len(prompts) * params.n} answers failed; the first, of line {line}: {error}")
    return int(bool(failures))


def sampling_params(args: GenerateArgs) -> SamplingParams:
    """The flags as `SamplingParams`. Raises `ConfigError` naming the flag."""
    names = {item.name for item in dataclasses.fields(SamplingParams)}
    values = {name: getattr(args, name) for name in names if hasattr(args, name)}
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    try:
        return SamplingParams(**values)
    except ParameterError as error:
        is_named = error.param is None or str(error).startswith(error.param)
        raise ConfigError(f"--{error}" if is_named else f"--{error.param}: {error}") from error


def answer(llm: LLM, prompts: list[PromptLine], params: SamplingParams, file: Output) -> list[tuple[int, str]]:
    """Generate all answers, and write each when it and those before it are complete; returns (line, error) of those
    that failed."""
    failures: list[tuple[int, str]] = []
    with objects_kept():
        for item, output in zip(prompts, llm.generate_each([item.prompt for item in prompts], params), strict=True):
            file.write([to_json(item, output)])
            failures += [(item.line, reason(choice)) for choice in output.outputs if choice.error]
    return failures


def reason(choice: Completion) -> str:
    """Why a choice failed: in a sentence where there is one, with the code."""
    sentence = choice.message or REASONS.get(str(choice.error), "")
    return f"{sentence} ({choice.error})" if sentence else str(choice.error)


def to_json(item: PromptLine, output: GenerateOutput) -> str:
    """One line of the answers: the object's other keys, the prompt, and its choices."""
    choices = [_choice(choice) for choice in output.outputs]
    content: dict[str, Any] = {**item.extra, "prompt": item.prompt, "outputs": choices}
    if output.prompt_logprobs is not None:
        content["prompt_logprobs"] = _logprobs(output.prompt_logprobs)
    return msgspec.json.encode(content).decode()


def _choice(choice: Completion) -> dict[str, Any]:
    content: dict[str, Any] = {
        "text": choice.text,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
    }
    for name in ("stop_reason", "error"):
        if getattr(choice, name) is not None:
            content[name] = getattr(choice, name)
    if choice.logprobs is not None:
        content["logprobs"] = _logprobs(choice.logprobs)
    return content


def _logprobs(positions: list[TokenLogprobs]) -> list[dict[str, Any]]:
    """For each position the token itself and the likeliest ones."""
    return [{"token_ids": one.token_ids, "logprobs": one.logprobs} for one in positions]


def report(before: EngineStats, after: EngineStats, prompts: int, seconds: float) -> None:
    """Counts and speed on standard error, apart from the answers."""
    read = after.prompt_tokens - before.prompt_tokens
    written = after.generated_tokens - before.generated_tokens
    noun = "prompt" if prompts == 1 else "prompts"
    print(
        f"{prompts} {noun}, {read} prompt tokens, {written} generated tokens in {seconds:.2f} s: "
        f"{written / max(seconds, 1e-9):,.1f} tokens/s",
        file=sys.stderr,
    )


@contextlib.contextmanager
def progress(llm: LLM, answers: int) -> Iterator[None]:
    """On a terminal show the tokens generated so far while the body runs; elsewhere nothing."""
    if not is_terminal(sys.stderr):
        yield
        return
    from rich.console import Console

    done = threading.Event()
    with Console(stderr=True).status(f"{answers} answers") as status:

        def watch() -> None:
            while not done.wait(0.25):
                stats = llm.stats()
                status.update(f"{stats.generated_tokens:,} tokens, {stats.running} running, {stats.waiting} waiting")

        watcher = threading.Thread(target=watch, name="progress", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
