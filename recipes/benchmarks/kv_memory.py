"""What mapping KV memory costs and wastes under load: `python recipes/benchmarks/kv_memory.py MODEL`.

Requests of random lengths keep `--streams` sequences running. Once all run, the memory they hold without having written
to it is read off at every step, the internal waste. Every wait of a step for its mappings is noted, and whether the GPU
had work left when it ended: if so, the step lost nothing by it, else it was launched late. With `--fill` the pool is
full of cached prompts at first, as after some minutes under load; with `--poll` steps are planned late, as in a server.
"""

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.engine.loop import POLL_SECONDS
from bladellm_runtime.garbage import keep_objects
from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.operations import MemoryPlan, Rows, Show
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one

NOTICED_SECONDS = 1e-4
"""A wait shorter than that is none."""
DRAWN_PROMPTS = 1024
"""Prompts that are drawn before; they come again with another first token."""
TRACED_EVENTS = 512
LONGEST = 5
"""Waits of each kind that are reported one by one."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A step's wait for mappings. decode: whether the step has decode rows alone. late: whether the GPU had run dry
    when it ended. cause: what it was for; `host` where the GPU was dry when it began. views: granules that its plan had
    to show. jobs: milliseconds of what was being mapped meanwhile, by kind, each from its beginning."""

    seconds: float
    decode: bool
    late: bool
    cause: str
    views: int
    jobs: dict[str, float]


@dataclass(slots=True)
class Trace:
    """Each wait for mappings, and the share of the cache that was held in vain at each step."""

    waits: list[Wait] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)
    _rows: Rows | None = None
    _views: int = 0

    def watch(self, arena: KvArena) -> None:
        """Note every wait of an engine's arena from now on."""
        submit, wait, stream = arena.submit, arena.wait, torch.cuda.current_stream(arena.device)

        def submitted(plan: MemoryPlan, rows: Rows | None = None) -> None:
            self._rows = rows
            self._views = sum(len(view.granules) for view in plan.views if isinstance(view, Show))
            submit(plan, rows)

        def waited() -> None:
            dry, converted = stream.query(), arena.stats.splits + arena.stats.joins
            start = time.perf_counter()
            wait()
            seconds = time.perf_counter() - start
            late = stream.query()
            converted = arena.stats.splits + arena.stats.joins - converted
            decode = self._rows is None or bool((self._rows.query_lens == 1).all())
            cause, jobs = self._cause(seconds, dry, converted), _jobs(arena, start)
            self.waits.append(Wait(seconds, decode, late, cause, self._views, jobs))

        arena.stats.trace(TRACED_EVENTS)
        arena.submit, arena.wait = submitted, waited  # type: ignore[method-assign]

    def _cause(self, seconds: float, dry: bool, converted: int) -> str:
        if dry or seconds < NOTICED_SECONDS:
            return "host" if dry else "none"
        if converted:
            return "a block to be converted"
        return "views of its own plan" if self._views else "views of earlier plans"


def _jobs(arena: KvArena, start: float) -> dict[str, float]:
    """What an arena did since a moment."""
    found: Counter[str] = Counter()
    for event in arena.stats.events:
        if event.end > start and event.kind != "wait":
            found[event.kind] += 1e3 * (event.end - event.start)
            found[f"{event.kind}s"] += 1
    return dict(found)


def run(engine: Engine, args: argparse.Namespace) -> Trace:
    """Load the engine for `--steps` steps with all streams running."""
    rng, trace, core = random.Random(args.seed), Trace(), engine.core
    running, sent = 0, 0
    # Drawing them takes a millisecond each, which would be the GPU's.
    prompts = [draw_tokens(rng, engine, rng.randint(1, args.prompt)) for _ in range(DRAWN_PROMPTS)]
    while len(trace.waste) < args.steps:
        while running < args.streams:
            prompt = prompts[sent % DRAWN_PROMPTS]
            prompt = [sent % engine.ready.vocab_size, *prompt[1:]]
            params = SamplingParams(max_tokens=rng.randint(1, args.answer), temperature=0.0, ignore_eos=True)
            core.add(AddRequest(sent, prompt, params, 0, time.monotonic()))
            running, sent = running + 1, sent + 1
        while args.poll and core.spare_seconds() >= POLL_SECONDS:
            time.sleep(POLL_SECONDS)
        running -= sum(delta.finish is not None for delta in one_by_one(core.step()))
        stats = core.stats(time.monotonic())
        if stats.waiting <= args.streams // 16:
            if not trace.waits:
                trace.watch(engine.arena)
            trace.waste.append(stats.kv_tokens_unused / (stats.kv_granules * stats.granule_tokens))
    core.abort(list(range(sent)))
    while not core.idle:
        core.step()
    return trace


def draw_tokens(rng: random.Random, engine: Engine, length: int) -> list[int]:
    return [rng.randrange(engine.ready.vocab_size) for _ in range(length)]


def fill(engine: Engine, args: argparse.Namespace) -> None:
    """Fill the pool with prompts that nobody asks for again."""
    core, rng, sent = engine.core, random.Random(args.seed + 1), 0
    stats = core.stats(time.monotonic())
    while stats.kv_granules_cached < stats.kv_granules * 15 // 16 and sent * args.prompt < 4 * engine.ready.kv_tokens:
        prompt = draw_tokens(rng, engine, args.prompt)
        core.add(AddRequest(sent, prompt, SamplingParams(max_tokens=1, ignore_eos=True), 0, time.monotonic()))
        sent += 1
        while core.stats(time.monotonic()).waiting > args.streams // 16:
            core.step()
        stats = core.stats(time.monotonic())
    while not core.idle:
        core.step()
    core.reset_counters()


def report(engine: Engine, trace: Trace) -> dict[str, Any]:
    stats = engine.core.stats(time.monotonic())
    calls = sorted(engine.arena.stats.map_seconds)
    return {
        "kv_tokens": engine.ready.kv_tokens,
        "granule_tokens": stats.granule_tokens,
        "steps": len(trace.waste),
        "step_ms": 1e3 * stats.step_seconds / stats.steps,
        "waste_mean": statistics.mean(trace.waste),
        "waste_max": max(trace.waste),
        "maps": stats.kv_maps,
        "splits": engine.arena.stats.splits,
        "joins": engine.arena.stats.joins,
        "map_us_median": 1e6 * statistics.median(calls),
        "map_us_p99": 1e6 * calls[len(calls) * 99 // 100],
        "map_us_max": 1e6 * calls[-1],
        "decode_steps": summary([wait for wait in trace.waits if wait.decode]),
        "steps_with_prompts": summary([wait for wait in trace.waits if not wait.decode]),
    }


def summary(waits: Sequence[Wait]) -> dict[str, Any]:
    """How long steps of one kind waited, for what, and how many were launched after the GPU had run dry."""
    seconds = sorted(wait.seconds for wait in waits)
    if not seconds:
        return {"steps": 0}
    return {
        "steps": len(seconds),
        "wait_us_median": 1e6 * statistics.median(seconds),
        "wait_us_p99": 1e6 * seconds[len(seconds) * 99 // 100],
        "wait_us_max": 1e6 * seconds[-1],
        "waits": dict(Counter(wait.cause for wait in waits)),
        "late": dict(Counter(wait.cause for wait in waits if wait.late)),
        "longest": [asdict(wait) for wait in sorted(waits, key=lambda wait: -wait.seconds)[:LONGEST]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=1024, help="longest prompt")
    parser.add_argument("--answer", type=int, default=512, help="longest answer")
    parser.add_argument("--load_format", default="auto")
    parser.add_argument("--kv_cache_quant", default="no_quant")
    parser.add_argument("--fill", action="store_true", help="begin with a pool full of cached prompts")
    parser.add_argument("--poll", action="store_true", help="plan each step as late as a server does")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = build_engine(
        EngineArgs(
            model=args.model, device="cuda", load_format=args.load_format, max_running_requests=args.streams,
            max_model_len=4 * (args.prompt + args.answer), kv_cache_quant=args.kv_cache_quant,
        )
    )  # fmt: skip
    if args.fill:
        fill(engine, args)
    keep_objects()
    found = report(engine, run(engine, args))
    engine.core.close()
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
