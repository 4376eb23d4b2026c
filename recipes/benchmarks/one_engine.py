"""All that is measured of one engine with one start: `python recipes/benchmarks/one_engine.py MODELS SHAPE`.

Decode steps by batch, prefills of an idle engine, offline throughput or long contexts of a shape (`shapes.py`), random
weights, as `targets.py` lists them; `--parts` picks. Which flags matter more is for the script of each part to try.
"""

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import decode_steps
import long_context
import offline
import prefill_steps
import psutil
from shapes import SHAPES, TOKENIZER, write_shape
from step_timing import Lateness, engine_as_served, watch_steps
from targets import CASES, Cases, Row, table

from bladellm_runtime.config import GIB, EngineArgs
from bladellm_runtime.engine.build import Engine

PARTS = ("decode", "prefill", "offline", "long")
SPARE_TOKENS = 300
"""Beyond a prompt and the steps that are timed: warm steps and those before all requests decode."""


def longest(cases: Cases, args: argparse.Namespace) -> int:
    """Tokens of the longest sequence that the parts need."""
    decode = [cases.decode_input + args.steps] if "decode" in args.parts else []
    prefill = cases.prefill if "prefill" in args.parts else ()
    at_once = [sum(cases.offline[1:])] if cases.offline and "offline" in args.parts else []
    contexts = cases.contexts.get(args.kv_cache_quant, ()) if "long" in args.parts else ()
    return max([*decode, *prefill, *at_once, *contexts, 8]) + SPARE_TOKENS


def build(args: argparse.Namespace, cases: Cases) -> Engine:
    """The engine of the shape, with as many slots as asked for, or enough for the largest batch and for all requests
    that are there at once. Every decode step of it is captured."""
    folder = write_shape(args.models, args.shape, args.tokenizer_dir)
    at_once = cases.offline[0] if cases.offline and "offline" in args.parts else 2
    slots = args.max_running_requests or max([*cases.decode, at_once])
    return engine_as_served(
        EngineArgs(
            model=str(folder), device=args.device, load_format="dummy", max_model_len=longest(cases, args),
            max_running_requests=slots, cuda_graph_max_batch_size=slots,
            kv_cache_quant=args.kv_cache_quant, kv_cache_gib=args.kv_cache_gib,
            max_gpu_memory_utilization=args.max_gpu_memory_utilization,
            tensor_parallel_size=args.tensor_parallel_size, disable_prompt_cache=True,
            packed_weights=args.packed_weights,
        )
    )  # fmt: skip


class OneEngine:
    """An engine and the rows that were measured of it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cases = args, CASES[args.shape]
        self.engine = build(args, self.cases)
        self.rows: list[Row] = []
        self.raw: dict[str, Any] = {"phases": self.engine.ready.phases, "memory": dict(self.engine.ready.memory)}
        self.add(f"engine ready, this start, {args.kv_cache_quant}", "s", time.time() - psutil.Process().create_time())
        self.clocks, self.lateness = watch_steps(self.engine.core), Lateness(self.engine.core._runner)

    def add(self, case: str, unit: str, value: float) -> None:
        """Keep a figure and show it; its case names a KV format that is not the model's own."""
        kind = self.args.kv_cache_quant
        case = case if kind == "no_quant" or kind in case else f"{case}, {kind}"
        self.rows.append(Row(self.args.shape, case, unit, value))
        print(table(self.rows[-1:]).splitlines()[-1], flush=True)

    def save(self) -> None:
        """Write what there is so far, where --json asks for it."""
        if self.args.json:
            rows = [{"case": row.case, "unit": row.unit, "value": row.value} for row in self.rows]
            self.args.json.write_text(json.dumps({"rows": rows, "raw": self.raw}, indent=2) + "\n")

    def decode(self) -> None:
        """Milliseconds of steps in which all requests decode, and what the host does for the largest."""
        args = argparse.Namespace(
            input=self.cases.decode_input,
            steps=self.args.steps,
            warm=5,
            traced=20,
            seed=0,
            temperature=0.0,
            trace=None,
            shared_prefix=0,
        )
        found = [
            decode_steps.measure(self.engine, self.clocks, self.lateness, args, batch) for batch in self.cases.decode
        ]
        for row in found:
            self.add(f"decode step, batch {row['batch']}", "ms", row["step_ms"])
        for row in found:
            self.add(f"host work, batch {row['batch']}", "µs", row["host_us"])
        self.raw["decode"] = found

    def prefill(self) -> None:
        """Milliseconds from a prompt's arrival at an idle engine to its first token."""
        args = argparse.Namespace(repeats=self.args.repeats, trace=False)
        bench = prefill_steps.Bench(self.engine, 0, self.clocks)
        graphs = bench.captures
        self.raw["prefill"] = []
        for tokens in self.cases.prefill:
            row = prefill_steps.measure_prefill(bench, args, tokens, graphs)
            self.raw["prefill"].append(row)
            self.add(f"prefill of {tokens}", "ms", row["ms"])

    def offline(self) -> None:
        """Tokens a second of requests that are all there at the start: steps at the default pace, then unbounded."""
        assert self.cases.offline is not None
        paced = offline.measure(self.engine, *self.cases.offline, seed=0)
        self.add("offline, default --target_tbt_ms", "tokens/s", paced["tokens_per_s"])
        self.engine.core.bound_steps(None)
        free = offline.measure(self.engine, *self.cases.offline, seed=1)
        self.add("offline", "tokens/s", free["tokens_per_s"])
        self.raw["offline"] = [paced, free]

    def long(self) -> None:
        """Milliseconds a token after a long prompt, batch 1, and the seconds of the prompt."""
        kind, self.raw["long"] = self.args.kv_cache_quant, []
        for context in self.cases.contexts.get(kind, ()):
            row = long_context.measure(self.engine, context, self.args.tokens, random.Random(0))
            self.raw["long"].append(row)
            self.add(f"context of {context}, {kind}", "ms", row["tbt_ms"])
            self.add(f"first token of {context}, {kind}", "s", row["ttft_s"])


def has(cases: Cases, part: str, kind: str) -> bool:
    """Whether a part is measured of a shape with this KV format."""
    return bool(cases.contexts.get(kind) if part == "long" else getattr(cases, part))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="where model folders go")
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=100, help="decode steps timed a batch size")
    parser.add_argument("--repeats", type=int, default=15, help="prefills of 1024 tokens; fewer of longer ones")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to decode after a long prompt")
    parser.add_argument("--max_running_requests", type=int, help="slots, all captured; default: of the largest batch")
    parser.add_argument("--max_gpu_memory_utilization", type=float, default=0.93)
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--kv_cache_quant", default="no_quant")
    parser.add_argument("--kv_cache_gib", type=float)
    parser.add_argument("--packed_weights", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokenizer_dir", type=Path, default=TOKENIZER)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    args.parts = [part for part in args.parts if has(CASES[args.shape], part, args.kv_cache_quant)]
    one = OneEngine(args)
    print(f"GiB { ({name: round(size / GIB, 2) for name, size in one.engine.ready.memory}) }", flush=True)
    for part in args.parts:
        getattr(one, part)()
        one.save()
    one.engine.core.close()


if __name__ == "__main__":
    main()
