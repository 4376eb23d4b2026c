"""An engine to be timed, and where the host's time of its steps goes: methods wrapped by clocks."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.engine.ranked_runner import RankedRunner
from bladellm_runtime.engine.runner import ModelRunner
from bladellm_runtime.garbage import keep_objects
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one


def engine_as_served(args: EngineArgs) -> Engine:
    """An engine in this process, whose garbage collector is set as that of an engine's own process is."""
    engine = build_engine(args)
    keep_objects()
    return engine


def runner_of(core: EngineCore) -> ModelRunner:
    """The runner of this process, also where it has other ranks do the same."""
    runner: Any = core._runner
    return runner._runner if isinstance(runner, RankedRunner) else runner


class Clocks:
    """Seconds in each watched method, by name, since the last `reset`."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count calls of `owner.method` under `name`."""
        inner: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = inner(*args)
            self.seconds[name].append(time.perf_counter() - start)
            return result

        setattr(owner, method, timed)

    def reset(self) -> None:
        self.seconds.clear()

    def microseconds(self, name: str) -> float:
        """The median of a call; 0 without calls."""
        return 1e6 * float(np.median(self.seconds[name])) if self.seconds[name] else 0.0


def watch_steps(core: EngineCore) -> Clocks:
    """The clocks of an engine's steps: plan, launch (on a CPU the work itself) and its parts; wait, read, complete."""
    clocks = Clocks()
    scheduler, runner = core._scheduler, runner_of(core)
    clocks.watch(scheduler, "plan", "plan")
    clocks.watch(scheduler, "complete", "complete")
    clocks.watch(runner, "_run", "launch")
    clocks.watch(runner, "collect", "collect")
    clocks.watch(runner._arena, "submit", "submit memory")
    clocks.watch(runner._arena, "wait", "wait memory")
    clocks.watch(runner._results, "take", "copy results")
    if runner._graphs is not None:
        clocks.watch(runner._graphs.inputs, "send", "inputs")
        clocks.watch(runner._graphs, "forward", "replay forward")
        clocks.watch(runner._graphs, "sampling_stage", "sampling inputs")
        clocks.watch(runner._graphs, "sample", "replay sampling")
    return clocks


LAUNCH_PARTS = (
    "submit memory", "inputs", "wait memory", "replay forward", "sampling inputs", "replay sampling", "copy results",
)  # fmt: skip
"""What a launch that replays graphs does, in order."""


class Lateness:
    """Whether the device had already done the step before when a step's launch was over: it had nothing to do then."""

    def __init__(self, runner: Any) -> None:
        self.late: list[bool] = []
        self._launch = runner.launch
        self._last: Any = None
        runner.launch = self._watched

    def _watched(self, plan: Any) -> Any:
        step = self._launch(plan)
        before = getattr(self._last, "done", None)
        if isinstance(before, torch.cuda.Event):
            self.late.append(before.query())
        self._last = step
        return step


def start_decoding(
    engine: Engine,
    batch: int,
    prompt_len: int,
    tokens: int,
    seed: int,
    shared: int = 0,
    spread: int = 1,
    **sampling: Any,
) -> None:
    """Add `batch` requests of random prompts that never end early, and step until all of them decode.

    Steps take as many prompt tokens as the limits let them: bounded ones would have the first rows some hundred tokens
    ahead of the last.

    shared: tokens before those of each prompt that are the same in all of them. spread: different lengths of these
    prompts, from prompt_len on, evenly.
    """
    rng = np.random.default_rng(seed)
    params = SamplingParams(**({"temperature": 0.0} | sampling), max_tokens=tokens, ignore_eos=True, seed=seed)
    system = rng.integers(0, engine.ready.vocab_size, shared).tolist()
    for index in range(batch):
        length = prompt_len + index * spread // batch
        prompt = system + rng.integers(0, engine.ready.vocab_size, length).tolist()
        engine.core.add(AddRequest(index, prompt, params, 0, time.monotonic()))
    first: set[int] = set()
    with without_bound(engine.core):
        while len(first) < batch:
            first.update(delta.request_id for delta in one_by_one(engine.core.step()) if delta.tokens)


@contextmanager
def without_bound(core: EngineCore) -> Iterator[None]:
    """Steps as long as the limits let them be."""
    planner = core._scheduler._planner
    bound, target = planner.bound, planner.target
    core.bound_steps(None)
    try:
        yield
    finally:
        core.bound_steps(bound, target)


def decoded_kv(core: EngineCore) -> int:
    """KV tokens planned for all that decode."""
    return sum(batch.planned for batch in core._scheduler._roster.batches)


def finish(core: EngineCore, batch: int) -> None:
    """End the requests of `start_decoding`."""
    core.abort(range(batch))
    while not core.idle:
        core.step()
