"""Time of prefills on an idle engine and of steps that mix decode rows with a chunk: `prefill_steps.py MODEL`.

Runs the engine in this process, with steps with prefill chunks captured and not. With `--load_format dummy`, the
default, only a model folder's config is needed. `ms` is the median: of a prefill, from its arrival to its first token;
of a mixed step, the time of a run of such steps, a prompt arriving before each, by their number. `host ms` is the
median of what launching a step takes, `tokens` and `captured` are the mean of a step and the share of steps that were
replayed. With `--trace` a profiler runs over some more: idle is the share of the time in which no kernel ran.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from decode_steps import busy_share
from step_timing import Clocks, engine_as_served, finish, runner_of, start_decoding, watch_steps
from targets import PREFILL, Target, number
from torch.profiler import ProfilerActivity, profile

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.build import Engine
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one

COLUMNS = ("case", "graphs", "floor ms", "vLLM", "at least", "ms", "host ms", "tokens", "captured", "idle")
GOALS = {f"prefill {tokens}": target for tokens, target in PREFILL.items()}
FIRST_ID = 1_000_000
"""Of the prompts that are measured; `start_decoding` numbers its own from 0."""


class Bench:
    """An engine, what its steps held, and prompts to feed it."""

    def __init__(self, engine: Engine, seed: int, clocks: Clocks | None = None) -> None:
        """clocks: those of the engine's steps where it is watched already."""
        self.engine = engine
        self.clocks = clocks or watch_steps(engine.core)
        self.captures = bool(runner_of(engine.core).mixed_sizes)
        self.tokens: list[int] = []
        self.captured: list[bool] = []
        self._rng = np.random.default_rng(seed)
        self._number = FIRST_ID
        scheduler, runner = engine.core._scheduler, runner_of(engine.core)
        plan, eager = scheduler.plan, runner._run_eagerly

        def planned() -> Any:
            made = plan()
            if made is not None:
                self.tokens.append(sum(made.query_lens))
                self.captured.append(True)
            return made

        def launched(*args: Any) -> Any:
            self.captured[-1] = False
            return eager(*args)

        scheduler.plan, runner._run_eagerly = planned, launched

    def use_graphs(self, used: bool) -> None:
        """Whether steps with prefill chunks are replayed from now on, where they are captured, on every rank."""
        while not self.engine.core.idle:
            self.engine.core.step()
        runner: Any = self.engine.core._runner
        runner.use_mixed_graphs(used)

    def reset(self) -> None:
        self.clocks.reset()
        self.tokens.clear()
        self.captured.clear()

    def shape_of_steps(self) -> str:
        """What the steps since the last `reset` were."""
        return f"{np.mean(self.tokens):.0f} tokens a step, {np.mean(self.captured):.0%} of the steps captured"

    def prompt(self, tokens: int) -> AddRequest:
        """A random prompt of which one token is wanted."""
        self._number += 1
        prompt = self._rng.integers(0, self.engine.ready.vocab_size, tokens).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        return AddRequest(self._number, prompt, params, 0, time.monotonic())

    def prefill(self, tokens: int) -> float:
        """Seconds from the arrival of a prompt to its first token."""
        request = self.prompt(tokens)
        start = time.perf_counter()
        self.engine.core.add(request)
        while not any(
            delta.request_id == request.request_id and delta.tokens for delta in one_by_one(self.engine.core.step())
        ):
            pass
        return time.perf_counter() - start

    def mixed_steps(self, chunk: int, steps: int) -> float:
        """Seconds of so many steps, before each of which a prompt of `chunk` tokens arrives."""
        prompts = [self.prompt(chunk) for _ in range(steps)]
        start = time.perf_counter()
        for prompt in prompts:
            self.engine.core.add(prompt)
            self.engine.core.step()
        return time.perf_counter() - start

    def found(self, case: str, used: bool, seconds: float, idle: float | None) -> dict[str, Any]:
        return {
            "case": case, "graphs": used, "ms": 1e3 * seconds, "host_ms": self.clocks.microseconds("launch") / 1e3,
            "tokens": float(np.mean(self.tokens)), "captured": float(np.mean(self.captured)), "idle": idle,
        }  # fmt: skip


def measure_prefill(bench: Bench, args: argparse.Namespace, tokens: int, used: bool) -> dict[str, Any]:
    bench.use_graphs(used)
    bench.prefill(tokens)
    bench.reset()
    repeats = max(3, args.repeats * 1024 // tokens)
    seconds = float(np.median([bench.prefill(tokens) for _ in range(repeats)]))
    row = bench.found(f"prefill {tokens}", used, seconds, None)
    row["idle"] = idle_share(lambda: bench.prefill(tokens)) if args.trace else None
    return row


def measure_mixed(bench: Bench, args: argparse.Namespace, batch: int, chunk: int, used: bool) -> dict[str, Any]:
    bench.use_graphs(used)
    # The decoding requests and two prompts beside them always find slots.
    start_decoding(bench.engine, batch, args.input, args.steps + 200, args.seed)
    bench.mixed_steps(chunk, 6)
    bench.reset()
    seconds = bench.mixed_steps(chunk, args.steps) / args.steps
    row = bench.found(f"{batch} decodes + {chunk}", used, seconds, None)
    row["idle"] = idle_share(lambda: bench.mixed_steps(chunk, 6)) if args.trace else None
    finish(bench.engine.core, batch)
    return row


def idle_share(run: Callable[[], Any]) -> float | None:
    """Of the device while `run` does its work; None without one."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = profiler.events() or []
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")]
    return 1 - busy_share(kernels) if kernels else None


def report(row: dict[str, Any], shown: bool) -> str:
    """A row of the table; shown: with the targets, which are for one shape."""
    target = GOALS.get(row["case"], Target()) if shown else Target()
    targets = [number(figure) for figure in (target.floor, target.peer, target.least)]
    idle = "" if row["idle"] is None else f"{row['idle']:.1%}"
    cells = [row["case"], "on" if row["graphs"] else "off", *targets, f"{row['ms']:.2f}", f"{row['host_ms']:.2f}"]
    cells += [f"{row['tokens']:.0f}", f"{row['captured']:.0%}", idle]
    return f"| {' | '.join(map(str, cells))} |"


def run(args: argparse.Namespace) -> dict[str, Any]:
    longest = max([*args.prefills, *args.chunks, args.input + args.steps + 264]) + 16
    engine = engine_as_served(
        EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
            max_model_len=longest, max_running_requests=max([*args.batches, 1]) + 4, attn_cls=args.attn_cls,
            kv_cache_quant=args.kv_cache_quant, kv_cache_gib=args.kv_cache_gib, disable_prompt_cache=True,
            cuda_graph_prefill_tokens=args.cuda_graph_prefill_tokens,
            target_tbt_ms=0.0,  # which would cut the prompts beside decodes
        )
    )  # fmt: skip
    phases = {name: round(seconds, 2) for name, seconds in engine.ready.phases}
    memory = {name: round(size / GIB, 2) for name, size in engine.ready.memory}
    print(f"seconds {phases}; GiB {memory}", flush=True)
    bench, rows = Bench(engine, args.seed), []
    ways = [True, False] if bench.captures else [False]
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for tokens in args.prefills:
        for used in ways:
            rows.append(measure_prefill(bench, args, tokens, used))
            print(report(rows[-1], not args.no_targets), flush=True)
    for batch in args.batches:
        for chunk in args.chunks:
            for used in ways:
                rows.append(measure_mixed(bench, args, batch, chunk, used))
                print(report(rows[-1], not args.no_targets), flush=True)
    engine.core.close()
    return {"phases": phases, "memory_gib": memory, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--prefills", nargs="*", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--batches", nargs="*", type=int, default=[32, 128], help="requests that decode meanwhile")
    parser.add_argument("--chunks", nargs="*", type=int, default=[256, 512, 1024])
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of a request that decodes")
    parser.add_argument("--steps", type=int, default=30, help="mixed steps timed")
    parser.add_argument("--repeats", type=int, default=15, help="prefills of 1024 tokens; fewer of longer ones")
    parser.add_argument("--trace", action="store_true", help="profile some more of each, for the idle share")
    parser.add_argument("--cuda_graph_prefill_tokens", nargs="*", type=int, default=[], help="as the server's")
    parser.add_argument("--kv_cache_gib", type=float)
    for name, default in (("device", "auto"), ("dtype", "auto"), ("load_format", "dummy"),
                          ("attn_cls", "ragged_flash"), ("kv_cache_quant", "no_quant")):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--no_targets", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
