"""What several GPUs make of a shape: `python recipes/benchmarks/parallel_steps.py MODELS SHAPE [FLAGS]`.

Milliseconds a token by requests that decode together, of prefills on an idle engine, and tokens a second offline, with
random weights (`shapes.py`), beside what vLLM was measured to take and this project's goals where there are any:
`measured` is the median of single steps or prefills, and the mean beside it shows what a few of them waited for. What
`--seconds` leaves no time for is left out, the start included; one table comes last. `--overlap_sums_tokens 0` measures
prefills whose sums over ranks nothing hides.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import offline
import psutil
from prefill_steps import Bench
from shapes import SHAPES, TOKENIZER, write_shape
from step_timing import engine_as_served, finish, start_decoding
from targets import Target, number

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.build import Engine
from bladellm_runtime.wire.messages import one_by_one

WARM_TOKENS = 8
SPARE_TOKENS = 300
"""Of each request, besides those timed: the first ones decode while the others' prompts are computed."""
Figures = tuple[float, float | None]
"""The median, and the mean where there are several."""
Measured = tuple[str, str, float, float | None]
"""A case, its unit, and the figures."""

TWO_GPUS = {
    "decode 1": Target(peer=3.47, least=2.7), "decode 8": Target(peer=3.76, least=2.9),
    "decode 32": Target(peer=4.02, least=3.3), "decode 64": Target(peer=4.65, least=3.7),
    "decode 128": Target(peer=5.73, least=4.7), "decode 256": Target(peer=8.75, least=7.2),
    "prefill 1024": Target(peer=35.9, least=24.0), "prefill 8192": Target(peer=126.0, least=112.0),
    "prefill 32768": Target(peer=672.0, least=620.0), "offline": Target(peer=16304.0, least=20000.0),
}  # fmt: skip
FOUR_GPUS = {"decode 1": Target(least=2.1), "decode 64": Target(least=2.7)}
GOALS = {("llama31-8b", 2, 1): TWO_GPUS, ("llama31-8b", 4, 1): FOUR_GPUS}
"""By shape, tensor-parallel and pipeline-parallel degree, for H200s."""


def build(args: argparse.Namespace) -> Engine:
    """The engine, with room for the longest of what is measured."""
    longest = max([*args.prefills, args.input + args.steps + SPARE_TOKENS, args.input + args.output]) + 64
    return engine_as_served(
        EngineArgs(
            model=str(write_shape(args.models, args.shape, args.tokenizer_dir)), device=args.device,
            load_format="dummy", max_model_len=longest, max_running_requests=args.max_running_requests,
            cuda_graph_max_batch_size=args.cuda_graph_max_batch_size, kv_cache_gib=args.kv_cache_gib,
            max_gpu_memory_utilization=args.max_gpu_memory_utilization, disable_prompt_cache=True,
            tensor_parallel_size=args.tensor_parallel_size, pipeline_parallel_size=args.pipeline_parallel_size,
            pipeline_micro_batch=args.pipeline_micro_batch, overlap_sums_tokens=args.overlap_sums_tokens,
        )
    )  # fmt: skip


def decode_ms(engine: Engine, batch: int, args: argparse.Namespace) -> Figures:
    """Milliseconds in which each of `batch` requests gets a token, whichever steps share them."""
    start_decoding(engine, batch, args.input, args.steps + SPARE_TOKENS, seed=batch)
    made_in(engine, batch * WARM_TOKENS)
    steps = made_in(engine, batch * args.steps)
    finish(engine.core, batch)
    seconds, made = (sum(figures) for figures in zip(*steps, strict=True))
    return 1e3 * float(np.median([batch * each / tokens for each, tokens in steps])), 1e3 * seconds * batch / made


def made_in(engine: Engine, tokens: int) -> list[tuple[float, int]]:
    """Until so many tokens are there, of every step that made some: seconds since the last one, and its tokens."""
    steps: list[tuple[float, int]] = []
    start, left = time.perf_counter(), tokens
    while left > 0:
        if engine.core.idle:
            raise RuntimeError("requests ended before they were measured; lower --steps")
        made = sum(len(delta.tokens) for delta in one_by_one(engine.core.step()))
        if made:
            end = time.perf_counter()
            steps.append((end - start, made))
            start, left = end, left - made
    return steps


def prefill_ms(bench: Bench, tokens: int, args: argparse.Namespace) -> Figures:
    """Of the times from a prompt's arrival to its token, on an idle engine."""
    bench.prefill(tokens)
    repeats = max(3, args.repeats * 1024 // max(tokens, 1024))
    bench.reset()
    times = [1e3 * bench.prefill(tokens) for _ in range(repeats)]
    print(f"prefill {tokens}: {bench.shape_of_steps()}", flush=True)
    return float(np.median(times)), float(np.mean(times))


def offline_rate(engine: Engine, args: argparse.Namespace) -> Figures:
    """Tokens a second, the bound on steps with decodes lifted."""
    engine.core.bound_steps(None)
    return float(offline.measure(engine, args.requests, args.input, args.output, seed=1)["tokens_per_s"]), None


def plan(engine: Engine, args: argparse.Namespace) -> list[tuple[str, str, Callable[[], Figures]]]:
    """Every case, its unit and what measures it, the most wanted first."""
    bench = Bench(engine, 0)
    batches = [batch for batch in args.batches if batch <= args.max_running_requests]
    cases: list[tuple[str, str, Callable[[], Figures]]] = []
    cases += [(f"decode {batch}", "ms", lambda batch=batch: decode_ms(engine, batch, args)) for batch in batches]
    cases += [(f"prefill {size}", "ms", lambda size=size: prefill_ms(bench, size, args)) for size in args.prefills]
    if args.requests:
        cases.append(("offline", "tokens/s", lambda: offline_rate(engine, args)))
    return cases


def table(args: argparse.Namespace, rows: list[Measured]) -> str:
    """In Markdown, beside the goals."""
    goals = GOALS.get((args.shape, args.tensor_parallel_size, args.pipeline_parallel_size), {})
    lines = ["| case | unit | vLLM | at least | measured | mean | met |", f"| --- | --- |{' ---: |' * 4} --- |"]
    for case, unit, value, mean in rows:
        goal = goals.get(case, Target())
        met = "" if goal.least is None else ("yes" if (value >= goal.least) == unit.endswith("/s") else "no")
        cells = [case, unit, *map(number, (goal.peer, goal.least, value, mean)), met]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def kept_flags(args: argparse.Namespace) -> str:
    """All but folders and files, which are of one machine only."""
    return str({name: value for name, value in vars(args).items() if not isinstance(value, Path)})


def measure(args: argparse.Namespace) -> list[Measured]:
    """All cases that there is time for."""
    began = psutil.Process().create_time()
    engine = build(args)
    rows: list[Measured] = [("engine ready", "s", time.time() - began, None)]
    print("GiB", {name: round(size / GIB, 2) for name, size in engine.ready.memory}, flush=True)
    for case, unit, work in plan(engine, args):
        if time.time() - began > args.seconds:
            print(f"no time for {case}", flush=True)
            continue
        rows.append((case, unit, *work()))
        print(case, unit, *map(number, rows[-1][2:]), flush=True)
        if args.json:
            args.json.write_text(json.dumps({"flags": kept_flags(args), "rows": rows}, indent=2) + "\n")
    engine.core.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="where model folders go")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--pipeline_parallel_size", type=int, default=1)
    parser.add_argument("--pipeline_micro_batch", type=int)
    parser.add_argument("--overlap_sums_tokens", type=int, help="as the server's; 0: all sums whole")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--prefills", nargs="*", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--input", type=int, default=512, help="prompt tokens of requests that decode")
    parser.add_argument("--steps", type=int, default=60, help="tokens timed of each request that decodes")
    parser.add_argument("--repeats", type=int, default=9, help="prefills of 1,024 tokens; fewer of longer ones")
    parser.add_argument("--requests", type=int, default=2048, help="offline; 0: not measured")
    parser.add_argument("--output", type=int, default=256, help="tokens that each of those generates")
    parser.add_argument("--max_running_requests", type=int, default=256)
    parser.add_argument("--cuda_graph_max_batch_size", type=int)
    parser.add_argument("--max_gpu_memory_utilization", type=float, default=0.93)
    parser.add_argument("--kv_cache_gib", type=float)
    parser.add_argument("--seconds", type=float, default=480.0, help="after the process's start, no case is begun")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokenizer_dir", type=Path, default=TOKENIZER)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(f"\n{table(args, measure(args))}")


if __name__ == "__main__":
    main()
