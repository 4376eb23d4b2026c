"""An engine without a model: it speaks the wire's messages, and a token depends on prompt, choice and position only.

A constraint acts: `tests/support/fake_guide.py` picks a token that it allows, whatever the prompt says.

Its prompt cache remembers every prompt for ever, in granules and by salt, and says how much of a prompt it knew.

A prompt whose text holds a command makes it misbehave or say a given text:

- `@fake:say:TEXT`            the tokens of TEXT, to the end of the line or to the next `<`, then end of sequence
- `@fake:announced`           the same of how many requests were announced before
- `@fake:error:CODE`          the request ends with this error before its first token
- `@fake:error_after:N:CODE`  the same after N tokens
- `@fake:die` / `@fake:hang`  the process ends at once / the loop stops for ever
- `@fake:fail`                the engine reports `EngineFailed` and ends in order
- `@fake:garbage`             one message that does not decode, then an ordinary answer
- `@fake:slow_prefill:S`      S seconds pass in steps without a token before the first one

Run as a process with `python -m tests.support.fake_engine`, it takes the launch line of a real engine.
"""

import argparse
import json
import os
import re
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.request import FinishReason
from bladellm_runtime.wire.messages import (
    AbortRequests,
    AddRequest,
    AttachFrontEnd,
    EngineFailed,
    EngineReady,
    EngineStats,
    MoveAdapter,
    RequestComing,
    RequestDelta,
    Shutdown,
    StepOutput,
    TokenLogprobs,
    front_end_of,
)
from bladellm_runtime.wire.transport import EnginePort, FrontEndGone
from tests.support.fake_adapters import FakeAdapters
from tests.support.fake_steps import together
from tests.support.fake_tokens import (
    DEMO_MODEL,
    GRANULE_TOKENS,
    PromptMemory,
    granules,
    key_of,
    token_at,
    tokenizer,
    words,
)
from tests.support.packed_prompts import unpacked

if TYPE_CHECKING:
    from bladellm_runtime.guided.backend import Compiled, Matcher
    from tests.support.fake_guide import FakeGuide

VOCAB_SIZE = 8192
MAX_MODEL_LEN = 4096
EOS = 2
COMMAND = re.compile(r"@fake:(\w+)(?::([^\n<]*))?")


@dataclass
class FakeSettings:
    """How fast and how large the fake engine is."""

    step_seconds: float = 0.002
    slots: int = 256
    kv_tokens: int = 65536
    heartbeat_seconds: float = 0.25
    max_model_len: int = MAX_MODEL_LEN
    guided_cache_mib: float = 256.0
    max_loras: int = 4
    lora_load_seconds: float = 0.0


@dataclass
class Running:
    """A request with a slot."""

    request: AddRequest
    command: str
    argument: str
    scheduled_at: float
    key: int
    script: list[int] | None = None
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    matcher: "Matcher | None" = None

    @property
    def granules(self) -> int:
        return granules(len(self.request.prompt) + len(self.tokens))


class FakeEngine:
    """One engine's state; `run` is its loop."""

    def __init__(self, port: EnginePort, settings: FakeSettings) -> None:
        self._port = port
        self._settings = settings
        self._waiting: deque[AddRequest] = deque()
        self._running: dict[int, Running] = {}
        self._announced = 0
        self._compiling: dict[int, tuple[AddRequest, Future[Compiled]]] = {}
        self._matchers: dict[int, Matcher] = {}
        self._memory = PromptMemory()
        self._adapters = FakeAdapters(settings.max_loras, 2 * settings.max_loras, settings.lora_load_seconds)
        self._stats = EngineStats(
            slots=settings.slots, kv_granules=granules(settings.kv_tokens), granule_tokens=GRANULE_TOKENS
        )
        self._stop = False

    @cached_property
    def _guide(self) -> "FakeGuide":
        """Made for the first constraint: most tests have none."""
        from tests.support.fake_guide import FakeGuide

        return FakeGuide(DEMO_MODEL, VOCAB_SIZE, [EOS, 0], int(self._settings.guided_cache_mib * 2**20))

    def run(self) -> None:
        self._port.send(fake_ready(self._settings))
        while not self._stop:
            idle = not self._ids()
            deltas = self._receive(self._settings.heartbeat_seconds if idle else 0.0)
            deltas += self._take_compiled()
            deltas += self._step()
            self._port.send(StepOutput(together(deltas), self._reading()))
            if self._ids():
                time.sleep(self._settings.step_seconds)

    def _receive(self, timeout: float) -> list[RequestDelta]:
        deltas = []
        for message in self._port.receive(timeout):
            if isinstance(message, AddRequest):
                message = unpacked(message)
            if isinstance(message, MoveAdapter) or (isinstance(message, AddRequest) and message.adapter):
                deltas += self._adapters.enter(message)
            elif isinstance(message, AddRequest):
                self._queue(message)
            elif isinstance(message, RequestComing):
                self._announced += 1
            elif isinstance(message, AbortRequests):
                deltas += [self._abort(request_id) for request_id in message.request_ids if self._knows(request_id)]
            elif isinstance(message, AttachFrontEnd):
                self._port.attach(message)
                deltas += [self._abort(item) for item in self._ids() if front_end_of(item) == message.front_end]
            elif isinstance(message, Shutdown):
                self._stop = True
        return deltas

    def _ids(self) -> list[int]:
        waiting = (item.request_id for item in self._waiting)
        return [*self._running, *self._compiling, *waiting, *self._adapters.request_ids]

    def _knows(self, request_id: int) -> bool:
        return request_id in self._ids()

    def _abort(self, request_id: int) -> RequestDelta:
        self._running.pop(request_id, None)
        self._compiling.pop(request_id, None)
        self._matchers.pop(request_id, None)
        self._waiting = deque(item for item in self._waiting if item.request_id != request_id)
        self._adapters.release(request_id)
        return RequestDelta(request_id, [], finish=FinishReason.ABORT)

    def _queue(self, request: AddRequest) -> None:
        """Have a request whose adapter is there wait for its constraint, then for a slot."""
        if request.constraint is None:
            self._waiting.append(request)
        else:
            self._compiling[request.request_id] = request, self._guide.compiling(request.constraint)

    def _take_compiled(self) -> list[RequestDelta]:
        """Let requests whose constraint is compiled wait for a slot; returns the refusals of the others."""
        refused = []
        for request_id, (request, future) in list(self._compiling.items()):
            if not future.done():
                continue
            del self._compiling[request_id]
            error = future.exception()
            if error is None:
                self._matchers[request_id] = self._guide.matcher(future.result())
                self._waiting.append(request)
            else:
                self._adapters.release(request_id)
                refused.append(
                    RequestDelta(request_id, [], FinishReason.ERROR, "constraint_refused", message=str(error))
                )
        return refused

    def _step(self) -> list[RequestDelta]:
        started = time.monotonic()
        deltas = [delta for running in list(self._running.values()) if (delta := self._decode(running)) is not None]
        ready, ended = self._adapters.poll()
        for request in ready:
            self._queue(request)
        deltas += ended + self._admit()
        if self._running or deltas:
            self._stats.steps += 1
            self._stats.step_seconds += time.monotonic() - started + self._settings.step_seconds
        return deltas

    def _admit(self) -> list[RequestDelta]:
        refused = []
        while self._waiting and len(self._running) < self._settings.slots:
            request = self._waiting[0]
            if granules(len(request.prompt) + (request.params.max_tokens or 0)) > self._stats.kv_granules:
                refused.append(self._waiting.popleft())
                continue
            if (
                self._used() + granules(len(request.prompt) + (request.params.max_tokens or 0))
                > self._stats.kv_granules
            ):
                break
            self._waiting.popleft()
            self._start(request)
        for item in refused:
            self._adapters.release(item.request_id)
        return [RequestDelta(item.request_id, [], FinishReason.ERROR, "context_length_exceeded") for item in refused]

    def _start(self, request: AddRequest) -> None:
        found = COMMAND.search(tokenizer().decode(request.prompt[-512:], skip_special_tokens=False))
        command, argument = (found.group(1), found.group(2) or "") if found else ("", "")
        key = key_of(request.prompt, request.choice) ^ self._adapters.content(request.adapter)
        running = Running(request, command, argument, time.monotonic(), key)
        if command in ("say", "announced"):
            said = argument if command == "say" else str(self._announced)
            running.script = [*tokenizer().encode(said, add_special_tokens=False).ids, EOS]
        running.matcher = self._matchers.pop(request.request_id, None)
        running.cached = self._memory.enter(request.prompt, request.cache_salt + "\0" + request.adapter)
        self._stats.prompt_tokens += len(request.prompt)
        self._stats.cached_tokens += running.cached
        self._running[request.request_id] = running
        self._misbehave(running)

    def _misbehave(self, running: Running) -> None:
        if running.command == "die":
            os._exit(9)
        elif running.command == "hang":
            threading.Event().wait()
        elif running.command == "garbage":
            self._port.send_frame(b"\xc1 not msgpack")
        elif running.command == "fail":
            self._port.send(EngineFailed("the fake engine was told to fail", 3))
            self._stop = True

    def _decode(self, running: Running) -> RequestDelta | None:
        error = self._error(running)
        if error is not None:
            return self._end(running, [], FinishReason.ERROR, error)
        if running.command == "slow_prefill" and time.monotonic() < running.scheduled_at + float(running.argument):
            return None
        params, position = running.request.params, len(running.tokens)
        if params.max_tokens == 0:
            return self._end(running, [], FinishReason.LENGTH, None)
        try:
            token = self._next_token(running, position)
        except RuntimeError as failure:
            delta = self._end(running, [], FinishReason.ERROR, "constraint_failed")
            delta.message = f"The constraint could not be followed to its end: {failure}"
            return delta
        running.tokens.append(token)
        self._stats.generated_tokens += 1
        room = self._settings.max_model_len - len(running.request.prompt)
        if self._stops(running, token):
            return self._end(running, [token], FinishReason.STOP, None)
        if len(running.tokens) >= min(params.max_tokens or room, room):
            return self._end(running, [token], FinishReason.LENGTH, None)
        return self._delta(running, [token], None, None)

    def _next_token(self, running: Running, position: int) -> int:
        if running.matcher is not None:
            return self._guide.next_token(running.matcher, running.key, position)
        if running.script is not None:
            return running.script[min(position, len(running.script) - 1)]
        return token_at(running.key, position)

    def _stops(self, running: Running, token: int) -> bool:
        params = running.request.params
        if running.matcher is not None:
            return token in (EOS, 0)  # is in its masks only where the text may end
        if len(running.tokens) < params.min_tokens:
            return False
        return token in params.stop_token_ids or (token == EOS and not params.ignore_eos)

    def _error(self, running: Running) -> str | None:
        if running.command == "error":
            return running.argument
        if running.command == "error_after":
            count, code = running.argument.split(":")
            return code if len(running.tokens) >= int(count) else None
        return None

    def _end(self, running: Running, tokens: list[int], finish: FinishReason, error: str | None) -> RequestDelta:
        del self._running[running.request.request_id]
        self._adapters.release(running.request.request_id)
        return self._delta(running, tokens, finish, error)

    def _delta(
        self, running: Running, tokens: list[int], finish: FinishReason | None, error: str | None
    ) -> RequestDelta:
        params, first = running.request.params, len(running.tokens) == len(tokens)
        delta = RequestDelta(running.request.request_id, tokens, finish, error)
        if first:
            delta.scheduled_at = running.scheduled_at
            delta.cached_tokens = running.cached
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = [fake_logprobs(t, params.prompt_logprobs) for t in running.request.prompt[1:]]
        if params.logprobs is not None:
            delta.logprobs = [fake_logprobs(token, params.logprobs) for token in tokens]
        return delta

    def _used(self) -> int:
        return sum(running.granules for running in self._running.values())

    def _reading(self) -> EngineStats:
        self._stats.time = time.monotonic()
        self._stats.running = len(self._running)
        self._stats.waiting = len(self._waiting) + len(self._compiling)
        if "_guide" in vars(self):
            self._guide.count(self._stats)
        self._stats.kv_granules_used = self._used()
        self._adapters.add_stats(self._stats)
        return self._stats


def fake_logprobs(token: int, count: int) -> TokenLogprobs:
    """The token at -0.25, which is also the most likely one, and `count - 1` others below it."""
    others = [words()[(token + rank) % len(words())] for rank in range(1, count)]
    best = [token, *others][:count]
    return TokenLogprobs([token, *best], [-0.25, *(-0.25 - rank for rank in range(count))])


def fake_ready(settings: FakeSettings) -> EngineReady:
    return EngineReady(
        vocab_size=VOCAB_SIZE,
        max_model_len=settings.max_model_len,
        kv_tokens=settings.kv_tokens,
        eos_token_ids=[EOS, 0],
        device="fake",
        dtype="none",
        memory=[],
        phases=[],
    )


def run_fake_engine(port: EnginePort, settings: FakeSettings | None = None) -> None:
    """Serve one front end until it says `Shutdown` or is gone."""
    tokenizer(), words()
    try:
        FakeEngine(port, settings or FakeSettings()).run()
    except FrontEndGone:
        return


def exit_with_front_end() -> None:
    """End this process when its standard input ends."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--settings", type=json.loads, default={})
    options = parser.parse_args()
    launch = msgspec.json.decode(sys.stdin.buffer.readline())
    args = msgspec.convert(launch["args"], EngineArgs)
    settings = FakeSettings(**{"slots": args.slots, **options.settings})
    if args.max_model_len is not None:
        settings.max_model_len = args.max_model_len
    threading.Thread(target=exit_with_front_end, daemon=True).start()
    port = EnginePort(launch["address"])
    run_fake_engine(port, settings)
    port.close()
    os._exit(0)


if __name__ == "__main__":
    main()
