"""Time of a decode step whose rows have LoRA adapters: `python recipes/benchmarks/adapter_steps.py MODEL`.

Runs the engine in this process. With `--load_format dummy`, the default, only a model folder's config is needed; the
adapters are random numbers in the slots, of the full rank in every layer. Row i has adapter i modulo their number.
`ratio` is to the step of the same rows without adapters, measured just before and just after. `--way` chooses how
layers of plain weights add adapters to decode rows: `tiled` is what is served, the others are to compare it with.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.linear import use_table
from bladellm_kernels.linear_schedules import load_table
from bladellm_kernels.lora_tokens import TokenAdapters
from step_timing import engine_as_served, finish, runner_of

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine import decode_inputs
from bladellm_runtime.engine.build import Engine
from bladellm_runtime.layers import lora
from bladellm_runtime.models import lora_stacking
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.prepared import NO_ADAPTER, Prepared
from bladellm_runtime.wire.messages import AddRequest, one_by_one

GOALS = {8: 1.15, 32: 1.30}
"""Largest ratio at 32 rows of the Llama-3.1-8B shape, by number of adapters."""

WAYS = ("alone", "beside", "stacked", "delayed", "tiled")
"""A by a kernel of its own in front of the layer, or on a stream beside it; behind the layer's weight, with norms of
their own; with norms whose division is delayed; and with B of gate and up read once for many rows."""


def fill_slots(engine: Engine) -> None:
    """Random numbers for every adapter of this rank."""
    memory = runner_of(engine.core)._model.lora
    if memory is None:
        raise RuntimeError("the engine was built without adapters")
    for matrices in memory.matrices:
        matrices.normal_(0.0, 0.02)
    memory.scales.fill_(1.0)


def take(way: str) -> None:
    """What is built from now on adds adapters that way."""
    lora_stacking.STACKED = way in ("stacked", "delayed", "tiled")
    lora.DELAYED_NORMS = way in ("delayed", "tiled")
    if way != "tiled" and has_triton():
        from bladellm_kernels import lora_stacked_tiles_triton

        lora_stacked_tiles_triton.TILED = False
    if way == "alone":
        decode_inputs.TokenAdapters = lambda slots, beside: TokenAdapters(slots)  # type: ignore[misc, assignment]


def step_ms(engine: Engine, args: argparse.Namespace, adapters: int) -> float:
    """Milliseconds of a step of `args.batch` rows; adapters: how many different ones, 0 for the base model."""
    core, rng = engine.core, np.random.default_rng(args.seed)
    params = SamplingParams(temperature=0.0, max_tokens=args.steps + args.warm + 300, ignore_eos=True)
    for row in range(args.batch):
        prompt = rng.integers(0, engine.ready.vocab_size, args.input).tolist()
        prepared = Prepared(adapter=row % adapters if adapters else NO_ADAPTER)
        core.add(AddRequest(row, prompt, params, 0, time.monotonic()), prepared)
    started: set[int] = set()
    while len(started) < args.batch:
        started.update(delta.request_id for delta in one_by_one(core.step()) if delta.tokens)
    for _ in range(args.warm):
        core.step()
    start = time.perf_counter()
    for _ in range(args.steps):
        core.step()
    seconds = time.perf_counter() - start
    finish(core, args.batch)
    return 1e3 * seconds / args.steps


def measure(engine: Engine, args: argparse.Namespace, adapters: int) -> dict[str, Any]:
    """One row of the table."""
    before = step_ms(engine, args, 0)
    found = step_ms(engine, args, adapters)
    base = (before + step_ms(engine, args, 0)) / 2
    return {"batch": args.batch, "adapters": adapters, "base_ms": base, "step_ms": found, "ratio": found / base}


def report(row: dict[str, Any], shown: bool) -> str:
    """A row of the table; shown: with the goal, which is for one shape and batch."""
    goal = GOALS.get(row["adapters"]) if shown and row["batch"] == 32 else None
    bound = "" if goal is None else f"{goal:.2f}"
    times = f"{row['base_ms']:.3f} | {row['step_ms']:.3f} | {row['ratio']:.3f}"
    return f"| {row['batch']} | {row['adapters']} | {times} | {bound} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of a request")
    parser.add_argument("--steps", type=int, default=100, help="steps timed")
    parser.add_argument("--warm", type=int, default=10, help="steps before those")
    parser.add_argument("--kv_cache_gib", type=float)
    parser.add_argument("--way", choices=WAYS, default="tiled")
    parser.add_argument("--table", type=Path, help="schedules of linear layers in place of the shipped ones")
    parser.add_argument("--no_targets", action="store_true")
    for name, default in (("device", "auto"), ("dtype", "auto"), ("load_format", "dummy")):
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    slots = max(args.adapters)
    take(args.way)
    use_table(load_table(args.table) if args.table else None)
    engine = engine_as_served(
        EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
            max_model_len=args.input + args.steps + args.warm + 300, max_running_requests=args.batch,
            kv_cache_gib=args.kv_cache_gib, disable_prompt_cache=True,
            enable_lora=True, max_lora_rank=args.rank, max_loras=slots, max_cpu_loras=slots,
        )
    )  # fmt: skip
    fill_slots(engine)
    print("| batch | adapters | base ms | step ms | ratio | at most |\n|" + " --- |" * 6)
    rows = []
    for adapters in args.adapters:
        rows.append(measure(engine, args, adapters))
        print(report(rows[-1], not args.no_targets), flush=True)
    engine.core.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
