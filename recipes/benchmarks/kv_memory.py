"""What mapping KV memory costs and wastes under load: `python recipes/benchmarks/kv_memory.py MODEL`.

Requests of random lengths keep `--streams` sequences running. Once all run, the memory they hold without having written
to it is read off at every step, the internal waste. Every wait of a step for its mappings is noted, and whether the GPU
had work left when it ended: if so, the step lost nothing by it.
"""

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest


@dataclass(slots=True)
class Trace:
    """Seconds of each wait for mappings, whether the GPU was idle after it, and the share of the cache held in vain."""

    waits: list[float] = field(default_factory=list)
    idle: list[bool] = field(default_factory=list)
    waste: list[float] = field(default_factory=list)

    def watch(self, engine: Engine) -> None:
        """Note every wait of the engine from now on."""
        arena, stream = engine.arena, torch.cuda.current_stream(engine.arena.device)
        wait = arena.wait

        def noted() -> None:
            start = time.perf_counter()
            wait()
            self.waits.append(time.perf_counter() - start)
            self.idle.append(stream.query())

        arena.wait = noted  # type: ignore[method-assign]


def run(engine: Engine, args: argparse.Namespace) -> Trace:
    """Load the engine for `--steps` steps with all streams running."""
    rng, trace, core = random.Random(args.seed), Trace(), engine.core
    running, sent = 0, 0
    while len(trace.waste) < args.steps:
        while running < args.streams:
            prompt = [rng.randrange(engine.ready.vocab_size) for _ in range(rng.randint(1, args.prompt))]
            params = SamplingParams(max_tokens=rng.randint(1, args.answer), temperature=0.0, ignore_eos=True)
            core.add(AddRequest(sent, prompt, params, 0, time.monotonic()))
            running, sent = running + 1, sent + 1
        running -= sum(delta.finish is not None for delta in core.step())
        stats = core.stats(time.monotonic())
        if stats.waiting <= args.streams // 16:
            if not trace.waits:
                trace.watch(engine)
            trace.waste.append(stats.kv_tokens_unused / (stats.kv_granules * stats.granule_tokens))
    core.abort(list(range(sent)))
    while not core.idle:
        core.step()
    return trace


def report(engine: Engine, trace: Trace) -> dict[str, Any]:
    stats = engine.core.stats(time.monotonic())
    calls = sorted(engine.arena.stats.map_seconds)
    waits = sorted(trace.waits)
    critical = [wait for wait, idle in zip(trace.waits, trace.idle, strict=True) if idle and wait > 1e-4]
    return {
        "kv_tokens": engine.ready.kv_tokens,
        "granule_tokens": stats.granule_tokens,
        "steps": len(trace.waste),
        "step_ms": 1e3 * stats.step_seconds / stats.steps,
        "waste_mean": statistics.mean(trace.waste),
        "waste_max": max(trace.waste),
        "maps": stats.kv_maps,
        "map_us_median": 1e6 * statistics.median(calls),
        "map_us_p99": 1e6 * calls[len(calls) * 99 // 100],
        "map_us_max": 1e6 * calls[-1],
        "wait_us_median": 1e6 * statistics.median(waits),
        "wait_us_p99": 1e6 * waits[len(waits) * 99 // 100],
        "wait_us_max": 1e6 * waits[-1],
        "waits_with_the_gpu_idle_after": len(critical),
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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = build_engine(
        EngineArgs(
            model=args.model, device="cuda", load_format=args.load_format, max_running_requests=args.streams,
            max_model_len=4 * (args.prompt + args.answer), kv_cache_quant=args.kv_cache_quant,
        )
    )  # fmt: skip
    found = report(engine, run(engine, args))
    engine.core.close()
    print(json.dumps(found, indent=2))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
