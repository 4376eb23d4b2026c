"""Time of a decode step by batch size, and what the GPU does in it: `python recipes/benchmarks/decode_steps.py MODEL`.

Runs the engine in this process. With `--load_format dummy`, the default, only a model folder's config is needed.
`context` is the mean of the tokens that a row attends to, which a step of many rows goes by as much as by their number.
`host` is the median of what the CPU does for a step, waiting for the device left out; `map wait` the longest that a
launch waited for KV memory. Neither costs anything while the GPU runs the step before: `late` counts the steps
launched after it had. With `--shared_prefix` all prompts begin with so many tokens that are the same, and a batch is
measured twice: rows read them each for itself, and once for several where that pays. With `--trace` a profiler runs
over some more steps: idle is the share of the time in which no kernel ran.
"""

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from step_timing import (
    LAUNCH_PARTS,
    Clocks,
    Lateness,
    decoded_kv,
    engine_as_served,
    finish,
    start_decoding,
    watch_steps,
)
from targets import DECODE, Target, number
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.build import Engine
from bladellm_runtime.models.decoder import Decoder

HOST_PARTS = ("plan", "launch", "complete")


def measure(engine: Engine, clocks: Clocks, lateness: Lateness, args: argparse.Namespace, batch: int) -> dict[str, Any]:
    """Milliseconds a step, and microseconds of the host, of `batch` requests that all decode."""
    memory = engine.arena.stats
    tokens = args.steps + args.traced + 200
    start_decoding(engine, batch, args.input, tokens, args.seed, args.shared_prefix, temperature=args.temperature)
    run_steps(engine, args.warm)
    clocks.reset()
    lateness.late.clear()
    memory.trace(args.steps + 8)
    kv_before = decoded_kv(engine.core)
    seconds = run_steps(engine, args.steps)
    kv_after = decoded_kv(engine.core)
    waits = [event.end - event.start for event in memory.events if event.kind == "wait"]
    memory.trace(0)
    found: dict[str, Any] = {
        "batch": batch,
        "context": (kv_before + kv_after) / 2 / batch,
        "step_ms": 1e3 * seconds / args.steps,
        "host_us": sum(clocks.microseconds(part) for part in HOST_PARTS),
        "map_wait_us": 1e6 * max(waits, default=0.0),
        "late": sum(lateness.late),
    } | {f"{name}_us": clocks.microseconds(name) for name in ("plan", "launch", "complete")}
    found["launch_parts_us"] = {name: round(clocks.microseconds(name), 1) for name in LAUNCH_PARTS}
    if args.trace:
        found |= trace(engine, args, batch)
    finish(engine.core, batch)
    return found


def measure_reads(
    engine: Engine, clocks: Clocks, lateness: Lateness, args: argparse.Namespace, batch: int
) -> Iterator[dict[str, Any]]:
    """The same with what rows share read by each of them, and once where that pays; shared: steps that did so."""
    planner = engine.core._scheduler._planner
    shared_reads, shared = planner.shared_reads, [False]
    engine.core.watch = lambda plan, _: shared.append(bool(plan.prefixes))
    for reads in ("apart", "together"):
        planner.shared_reads = shared_reads if reads == "together" else None
        shared.clear()
        found = measure(engine, clocks, lateness, args, batch)
        yield found | {"reads": reads, "shared": sum(shared)}
    engine.core.watch = None


def run_steps(engine: Engine, steps: int) -> float:
    """Seconds of so many steps, of which all results are in."""
    start = time.perf_counter()
    for _ in range(steps):
        engine.core.step()
    return time.perf_counter() - start


def trace(engine: Engine, args: argparse.Namespace, batch: int) -> dict[str, float]:
    """Idle share of the device over `args.traced` steps; writes the kernels by time to `args.trace`."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run_steps(engine, args.traced)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = profiler.events() or []
    kernels = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith("Mem")]
    if not kernels:
        return {}
    steps = args.traced
    lines = [f"## batch {batch}: {busy_share(kernels):.2%} busy, {len(kernels) / steps:.0f} kernels a step", ""]
    lines += ["| kernel | calls a step | µs a step |", "| --- | --- | --- |"]
    totals: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        totals[kernel.name].append(kernel.time_range.elapsed_us())
    for name, times in sorted(totals.items(), key=lambda item: -sum(item[1]))[: args.kernels]:
        lines.append(f"| `{name[:90]}` | {len(times) / steps:.1f} | {sum(times) / steps:.1f} |")
    with args.trace.open("a") as file:
        file.write("\n".join(lines) + "\n\n")
    return {"idle_share": 1 - busy_share(kernels), "kernels": len(kernels) / steps}


def busy_share(kernels: list[FunctionEvent]) -> float:
    """Of the time from the first kernel's start to the last one's end: some overlap where launches are dependent."""
    spans = sorted((kernel.time_range.start, kernel.time_range.end) for kernel in kernels)
    busy, reached = 0.0, spans[0][0]
    for start, end in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy / max(reached - spans[0][0], 1e-9)


def report(found: dict[str, Any], shown: bool) -> str:
    """A row of the table; shown: with the targets, which are for one shape."""
    target = DECODE.get(int(found["batch"]), Target()) if shown else Target()
    idle = f"{found['idle_share']:.2%}" if "idle_share" in found else ""
    step = f"{found['step_ms']:.3f} | {found['context']:.0f} | {found['host_us']:.0f} | {found['map_wait_us']:.0f}"
    step += f" | {found['late']:.0f} | {idle}"
    goals = " | ".join(number(figure) for figure in (target.floor, target.peer, target.least))
    reads = f" {found['reads']} ({found['shared']} shared)" if "reads" in found else ""
    return f"| {found['batch']}{reads} | {goals} | {step} |"


def print_host_parts(rows: list[dict[str, Any]]) -> None:
    """Where the host's time goes, in microseconds."""
    names = ["plan", *LAUNCH_PARTS, "complete"]
    print(f"\n| batch | {' | '.join(names)} |\n|" + " --- |" * (len(names) + 1))
    for row in rows:
        parts = [row["plan_us"], *row["launch_parts_us"].values(), row["complete_us"]]
        print(f"| {row['batch']} | {' | '.join(f'{part:.0f}' for part in parts)} |")


def run(args: argparse.Namespace) -> dict[str, Any]:
    tokens = args.shared_prefix + args.input + args.steps + args.traced + args.warm + 264
    engine = engine_as_served(
        EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
            max_model_len=tokens, max_running_requests=max(args.batches), kv_cache_quant=args.kv_cache_quant,
            attn_cls=args.attn_cls, kv_cache_gib=args.kv_cache_gib, disable_cuda_graph=args.disable_cuda_graph,
            disable_overlap=args.disable_overlap, disable_prompt_cache=not args.shared_prefix,
            max_gpu_memory_utilization=args.max_gpu_memory_utilization,
            tensor_parallel_size=args.tensor_parallel_size,
        )
    )  # fmt: skip
    phases = {name: round(seconds, 2) for name, seconds in engine.ready.phases}
    memory = {name: round(size / GIB, 2) for name, size in engine.ready.memory}
    print(f"seconds {phases}; GiB {memory}", flush=True)
    columns = ("batch", "floor ms", "vLLM", "at least", "step ms", "context", "host µs", "map wait µs", "late", "idle")
    print(f"| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    clocks, lateness, rows = watch_steps(engine.core), Lateness(engine.core._runner), []
    for batch in args.batches:
        case = (engine, clocks, lateness, args, batch)
        for row in measure_reads(*case) if args.shared_prefix else [measure(*case)]:
            rows.append(row)
            print(report(row, not args.no_targets and not args.shared_prefix), flush=True)
    print_host_parts(rows)
    engine.core.close()
    return {"phases": phases, "memory_gib": memory, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of a request")
    parser.add_argument("--shared_prefix", type=int, default=0, help="tokens before those that all prompts share")
    parser.add_argument("--steps", type=int, default=100, help="steps timed a batch size")
    parser.add_argument("--warm", type=int, default=10, help="steps before those")
    parser.add_argument("--trace", type=Path, help="file for the kernels by time, written anew")
    parser.add_argument("--traced", type=int, default=20, help="steps of the trace")
    parser.add_argument("--kernels", type=int, default=25, help="kernels listed")
    parser.add_argument("--fusion", choices=("auto", "never", "always"), default="auto", help="of linear layers")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--kv_cache_gib", type=float)
    parser.add_argument("--max_gpu_memory_utilization", type=float, default=0.9)
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    for name, default in (("device", "auto"), ("dtype", "auto"), ("load_format", "dummy"),
                          ("attn_cls", "ragged_flash"), ("kv_cache_quant", "no_quant")):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    for switch in ("disable_cuda_graph", "disable_overlap", "no_targets"):
        parser.add_argument(f"--{switch}", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.trace:
        args.trace.write_text("")
    if args.fusion != "auto" and args.tensor_parallel_size > 1:
        parser.error("--fusion is for one rank; leave it out with --tensor_parallel_size")
    if args.fusion != "auto":
        Decoder.fuses = lambda *_: args.fusion == "always"
    found = run(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
