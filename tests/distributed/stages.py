"""Engines whose pipeline stages are threads of this process: queues in place of links."""

import queue
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.distributed.links import PipelineLinks
from bladellm_runtime.engine.build import Engine, make_compiler, make_engine
from bladellm_runtime.engine.build_runner import BuiltRunner, StartRecord, build_runner
from bladellm_runtime.engine.constraints import Constraints
from bladellm_runtime.engine.rank_place import Others, RankPlace
from bladellm_runtime.engine.ranked_runner import choose_seeds
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.plan import INVALID
from bladellm_runtime.wire.messages import AddRequest, one_by_one
from tests.distributed.threads import run_ranks

WAIT_S = 60.0


class QueueLink:
    """Both ends of a link. It holds `most` messages, and fails where more would be on their way."""

    def __init__(self, most: int) -> None:
        self._queue: queue.Queue[torch.Tensor] = queue.Queue(most)

    def send(self, x: torch.Tensor) -> None:
        self._queue.put(x.clone(), timeout=WAIT_S)

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self._queue.get(timeout=WAIT_S))


@dataclass(frozen=True, slots=True)
class ThreadPlace(RankPlace):
    others: Others | None = None

    def join(self, args: EngineArgs, device: torch.device) -> Others | None:
        return self.others


class AllStages:
    """What `RankedRunner` is to processes."""

    def __init__(self, stages: list[BuiltRunner]) -> None:
        self._runners = [stage.runner for stage in stages]
        self.shared_rows, self.mixed_sizes = self._runners[0].shared_rows, self._runners[0].mixed_sizes
        self.most = 0
        self._in_flight = 0

    def launch(self, plan):
        choose_seeds(plan)
        self._in_flight += 1
        self.most = max(self.most, self._in_flight)
        return [runner.launch(plan) for runner in self._runners]

    def collect(self, launched):
        results = [runner.collect(step) for runner, step in zip(self._runners, launched, strict=True)]
        assert all(set(result.tokens.tolist()) == {INVALID} for result in results[:-1])
        self._in_flight -= 1
        return results[-1]

    def finished(self, launched) -> bool:
        return all(runner.finished(step) for runner, step in zip(self._runners, launched, strict=True))

    def use_mixed_graphs(self, on: bool) -> None:
        for runner in self._runners:
            runner.use_mixed_graphs(on)

    def add_stats(self, stats) -> None: ...

    def serve(self) -> None: ...

    def close(self) -> None:
        for runner in self._runners:
            runner.drain()
            runner.close()


def build_stages(folder: Path, stages: int, capture=None, **options) -> Engine:
    """An engine on the CPU. capture: makes a capture for each stage."""
    options = {"dtype": "float32", "device": "cpu", "kv_cache_gib": 0.05, "max_running_requests": 24} | options
    args = EngineArgs(model=str(folder), pipeline_parallel_size=stages, **options)
    spec, ways = read_model_spec(folder), [QueueLink(args.steps_in_flight) for _ in range(stages)]

    def build(every) -> BuiltRunner:
        own = every.rank
        before, behind = ways[own] if own else None, ways[own + 1] if own + 1 < stages else None
        links = PipelineLinks(before, behind, ways[0] if own in (0, stages - 1) else None)
        place = ThreadPlace(own, None, Others(every, None, links))
        return build_runner(args, folder, spec, place, StartRecord(), None if capture is None else capture())

    built = run_ranks(stages, build)
    constraints = Constraints(partial(make_compiler, args, folder, spec))
    return make_engine(built[0], folder, spec, StartRecord(), constraints, AllStages(built))


def run_requests(engine: Engine, prompts: list[list[int]], ways: list[SamplingParams]) -> list[list[int]]:
    """The tokens of every prompt, all asked at once. Leaves the engine idle."""
    core, found = engine.core, {number: [] for number in range(len(prompts))}
    for number, (prompt, way) in enumerate(zip(prompts, ways, strict=True)):
        assert not core.add(AddRequest(number, prompt, way, 0, 0.0))
    while not core.idle:
        for delta in one_by_one(core.step()):
            assert delta.error is None
            found[delta.request_id] += delta.tokens
        core.check()
    return list(found.values())
