"""Tokens a second of many requests that are all there at the start: `python recipes/benchmarks/offline.py MODEL`.

Runs the engine in this process, as fast as it goes: the bound that `--target_tbt_ms` sets on steps with decodes is off,
unless asked for. Prompts are random tokens and answers are not decoded to text. With `--load_format dummy`, the
default, only a model folder's config is needed.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from step_timing import engine_as_served

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine.build import Engine
from bladellm_runtime.llm import QUEUED_TOKENS
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.wire.messages import AddRequest, one_by_one

FIRST_ID = 2_000_000
"""Of the requests; other scripts on the same engine number theirs below."""


def measure(engine: Engine, requests: int, prompt_len: int, tokens: int, seed: int) -> dict[str, Any]:
    """Seconds from the arrival of the requests, all at once, to the last token, and tokens a second."""
    generate(engine, min(8, requests), min(64, prompt_len), min(16, tokens), seed + 1)
    preempted = engine.core.stats(time.monotonic()).preemptions
    seconds, made = generate(engine, requests, prompt_len, tokens, seed)
    if made != requests * tokens:
        raise RuntimeError(f"{made} tokens were generated where {requests * tokens} were asked for")
    return {
        "requests": requests, "input": prompt_len, "output": tokens, "seconds": seconds, "tokens_per_s": made / seconds,
        "total_tokens_per_s": (made + requests * prompt_len) / seconds,
        "preemptions": engine.core.stats(time.monotonic()).preemptions - preempted,
    }  # fmt: skip


def generate(engine: Engine, requests: int, prompt_len: int, tokens: int, seed: int) -> tuple[float, int]:
    """Seconds and generated tokens of random prompts, greedily answered to the asked length. They are handed to the
    engine as `LLM.generate` does it."""
    prompts = np.random.default_rng(seed).integers(0, engine.ready.vocab_size, (requests, prompt_len)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    start, made = time.perf_counter(), 0
    asked, begun = 0, set[int]()
    while asked < requests or not engine.core.idle:
        while asked < requests and (asked - len(begun)) * prompt_len < QUEUED_TOKENS:
            engine.core.add(AddRequest(FIRST_ID + asked, prompts[asked], params, 0, time.monotonic()))
            asked += 1
        for delta in one_by_one(engine.core.step()):
            begun.add(delta.request_id)
            made += len(delta.tokens)
    return time.perf_counter() - start, made


def report(found: dict[str, Any]) -> str:
    """The result in a line."""
    asked = f"{found['requests']} × ({found['input']} in, {found['output']} out)"
    rates = f"{found['tokens_per_s']:.0f} tokens/s generated, {found['total_tokens_per_s']:.0f} with prompts"
    return f"{asked}: {found['seconds']:.2f} s, {rates}, {found['preemptions']} preemptions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="model folder")
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of a request")
    parser.add_argument("--output", type=int, default=256, help="tokens that each generates")
    parser.add_argument("--max_running_requests", type=int, default=256)
    parser.add_argument("--target_tbt_ms", type=float, default=0.0, help="bound of steps with decodes; 0: none")
    parser.add_argument("--kv_cache_gib", type=float)
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--pipeline_parallel_size", type=int, default=1)
    parser.add_argument("--pipeline_micro_batch", type=int)
    for name, default in (("device", "auto"), ("dtype", "auto"), ("load_format", "dummy"),
                          ("attn_cls", "ragged_flash"), ("kv_cache_quant", "no_quant")):  # fmt: skip
        parser.add_argument(f"--{name}", default=default)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = engine_as_served(
        EngineArgs(
            model=args.model, device=args.device, dtype=args.dtype, load_format=args.load_format,
            max_model_len=args.input + args.output + 8, max_running_requests=args.max_running_requests,
            attn_cls=args.attn_cls, kv_cache_quant=args.kv_cache_quant, kv_cache_gib=args.kv_cache_gib,
            target_tbt_ms=args.target_tbt_ms, disable_prompt_cache=True,
            tensor_parallel_size=args.tensor_parallel_size, pipeline_parallel_size=args.pipeline_parallel_size,
            pipeline_micro_batch=args.pipeline_micro_batch,
        )
    )  # fmt: skip
    found = measure(engine, args.requests, args.input, args.output, args.seed)
    print(report(found))
    engine.core.close()
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
