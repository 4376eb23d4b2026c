"""Tokens a second of constrained answers beside free ones: `python recipes/benchmarks/constrained_throughput.py MODEL`.

Runs the engine in this process, with random tokens as prompts. The schema is a list of employees too long for any
answer, so that all answers, constrained or free, have the same number of tokens: `one` is that schema for every
request, `different` a schema with names of its own for each of those that run at once. Each case is measured between
two of the free one, after a round that is not counted. The model folder must have a tokenizer.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine, build_engine
from bladellm_runtime.request import Constraint, ConstraintKind, SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one

GOAL = 0.9
CASES = ("one", "different")


def schema_of(number: int) -> Constraint:
    """A long list of employees, whose fields have the number in their names."""
    history = {
        "type": "object",
        "properties": {name: {"type": "string"} for name in ("company", "duration", "position")},
        "required": ["company", "position"],
    }
    fields = {
        f"name {number}": {"type": "string"},
        f"age {number}": {"type": "integer"},
        f"skills {number}": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 3},
        f"work history {number}": {"type": "array", "items": history},
    }
    employee = {"type": "object", "properties": fields, "required": list(fields)}
    schema = {"type": "array", "items": employee, "minItems": 1000}
    return Constraint(ConstraintKind.JSON, orjson.dumps(schema).decode(), "guided_json")


def tokens_per_second(engine: Engine, args: argparse.Namespace, case: str) -> float:
    """Of `args.requests` requests that are all there at the start."""
    rng, running = np.random.default_rng(args.seed), args.batch
    params = SamplingParams(temperature=args.temperature, max_tokens=args.output, ignore_eos=True, seed=args.seed)
    start, made = time.perf_counter(), 0
    for number in range(args.requests):
        prompt = rng.integers(0, engine.ready.vocab_size, args.input).tolist()
        schema = {"free": None, "one": schema_of(0), "different": schema_of(number % running)}[case]
        engine.core.add(AddRequest(number, prompt, params, 0, time.monotonic(), constraint=schema))
    while not engine.core.idle:
        for delta in one_by_one(engine.core.step()):
            made += len(delta.tokens)
            if delta.error is not None:
                raise RuntimeError(f"a request failed: {delta.error}: {delta.message}")
    if made != args.requests * args.output:
        raise RuntimeError(f"{made} tokens were generated where {args.requests * args.output} were asked for")
    return made / (time.perf_counter() - start)


def measure(engine: Engine, args: argparse.Namespace, case: str) -> dict[str, Any]:
    """One row of the table."""
    tokens_per_second(engine, args, case)
    free = tokens_per_second(engine, args, "free")
    before = engine.core.stats(time.monotonic())
    found = tokens_per_second(engine, args, case)
    after = engine.core.stats(time.monotonic())
    free = (free + tokens_per_second(engine, args, "free")) / 2
    masks = after.guided_masks - before.guided_masks
    mask_us = 1e6 * (after.guided_mask_seconds - before.guided_mask_seconds) / masks
    return {"case": case, "free": free, "constrained": found, "ratio": found / free, "mask_us": mask_us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--batch", type=int, default=64, help="requests that run at once")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input", type=int, default=128, help="prompt tokens of a request")
    parser.add_argument("--output", type=int, default=200, help="tokens that each generates")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--kv_cache_gib", type=float)
    for name, default in (("device", "auto"), ("dtype", "auto"), ("load_format", "dummy"),
                          ("guided_backend", "llguidance")):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = build_engine(
        EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
            max_model_len=args.input + args.output + 8, max_running_requests=args.batch,
            kv_cache_gib=args.kv_cache_gib, target_tbt_ms=0.0, disable_prompt_cache=True,
            guided_backend=args.guided_backend, enable_json_warmup=args.guided_backend == "llguidance",
        )
    )  # fmt: skip
    print(f"| schemas at batch {args.batch} | free tokens/s | constrained | ratio (at least {GOAL}) | µs a mask |")
    print("|" + " --- |" * 5)
    rows = []
    for case in CASES:
        row = measure(engine, args, case)
        rows.append(row)
        figures = f"{row['free']:.0f} | {row['constrained']:.0f} | {row['ratio']:.3f} | {row['mask_us']:.0f}"
        print(f"| {case} | {figures} |", flush=True)
    engine.core.close()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
