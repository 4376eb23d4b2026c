"""Time to first token and between tokens of one long prompt: `python recipes/benchmarks/long_context.py MODEL`.

For every context length the engine prefills a random prompt of that many tokens and decodes `--tokens` more. With
`--load_format dummy` only a model folder's config is needed.
"""

import argparse
import itertools
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from step_timing import engine_as_served

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.build import Engine
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one


def measure(engine: Engine, context: int, tokens: int, rng: random.Random) -> dict[str, float]:
    """Seconds to the first token, and the median and worst milliseconds between the next ones."""
    prompt = [rng.randrange(engine.ready.vocab_size) for _ in range(context)]
    params = SamplingParams(max_tokens=tokens + 1, temperature=0.0, ignore_eos=True)
    start = time.monotonic()
    engine.core.add(AddRequest(context, prompt, params, 0, start))
    arrivals: list[float] = []
    while not engine.core.idle:
        if any(delta.tokens for delta in one_by_one(engine.core.step())):
            arrivals.append(time.monotonic())
    gaps = [1000 * (after - before) for before, after in itertools.pairwise(arrivals)]
    return {
        "context": context,
        "tokens": len(arrivals),
        "ttft_s": arrivals[0] - start,
        "tbt_ms": statistics.median(gaps),
        "tbt_max_ms": max(gaps),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Build one engine, measure every context, print a row each."""
    engine = engine_as_served(
        EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
            max_model_len=max(args.contexts) + args.tokens + 8, max_running_requests=args.slots,
            ragged_flash_max_batch_tokens=args.chunk, kv_cache_quant=args.kv_cache_quant, attn_cls=args.attn_cls,
            max_gpu_memory_utilization=args.max_gpu_memory_utilization, kv_cache_gib=args.kv_cache_gib,
            disable_prompt_cache=True,
        )
    )  # fmt: skip
    memory = {name: round(size / GIB, 2) for name, size in engine.ready.memory}
    print(f"{args.kv_cache_quant}: {engine.ready.kv_tokens} tokens of KV cache; GiB {memory}", flush=True)
    print("| context | first token s | token ms, median | worst |\n| --- | --- | --- | --- |")
    rows = []
    for context in args.contexts:
        row = measure(engine, context, args.tokens, random.Random(args.seed))
        rows.append(row)
        figures = f"{row['ttft_s']:.2f} | {row['tbt_ms']:.2f} | {row['tbt_max_ms']:.2f}"
        print(f"| {context} | {figures} |", flush=True)
    engine.core.close()
    return {"format": args.kv_cache_quant, "kv_tokens": engine.ready.kv_tokens, "memory_gib": memory, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768, 70000])
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode after the first")
    parser.add_argument("--chunk", type=int, default=8192, help="prompt tokens a step")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--kv_cache_gib", type=float)
    parser.add_argument("--max_gpu_memory_utilization", type=float, default=0.93)
    for name, default in (("device", "auto"), ("dtype", "auto"), ("load_format", "dummy"),
                          ("attn_cls", "ragged_flash"), ("kv_cache_quant", "no_quant")):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = run(args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
