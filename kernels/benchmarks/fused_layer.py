"""Time the linear layers of a decode step, with all that lies between them, on a Hopper: separate and fused kernels.

    python kernels/benchmarks/fused_layer.py [--rows 1 8 16] [--attention] [--table FILE] [--save-table FILE]

Llama-3.1-8B's shape in bfloat16. Schedules of the layers with norms are checked against float64 and timed one by one,
each over weights of several layers, and the best are taken; or those of a table. Then one CUDA graph a variant: of all
layers and the head, with the norms, residual additions and gates between them; given --attention also with rotary
embedding, KV write and decode attention. Two layers of each variant are checked against float64 before it is timed.
"""

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from bladellm_kernels import linear_launch
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear import linear, use_table
from bladellm_kernels.linear_launch import LinearCall, NextNorm, launch
from bladellm_kernels.linear_schedules import Entry, HopperSchedule, ScheduleTable, load_table, save_table
from bladellm_kernels.normed_linear import use_norms_table
from fused_candidates import norm_candidates
from fused_chain import (
    EPS,
    LLAMA_8B,
    Mix,
    Weights,
    fused,
    queries_only,
    random_attention,
    random_weights,
    reference,
    separate,
)
from gpu_timing import GpuTimer, machine
from linear import wrong as wrong_outputs
from torch import Tensor

ROWS = (1, 8, 16, 32, 64, 128)
DTYPE = torch.bfloat16
COLD_BYTES = 512 << 20
"""Weights that one layer's schedule is timed with: several times the L2 cache."""

Chain = Callable[[Weights, Tensor, Mix], Tensor]


@dataclass(frozen=True, slots=True)
class Variant:
    """A chain; fields: of all its schedules, changed; early: kernels of linear layers start before their inputs."""

    chain: Chain
    fields: tuple[tuple[str, int], ...] = ()
    early: bool = True

    @contextmanager
    def chosen(self, table: ScheduleTable) -> Iterator[None]:
        """Take its schedules and launches."""
        kept = linear_launch.early_launch
        table = changed(table, dict(self.fields))
        use_norms_table(table)
        use_table(without_gates(table))
        if not self.early:
            linear_launch.early_launch = lambda device: {"EARLY": False}
        try:
            yield
        finally:
            linear_launch.early_launch = kept


VARIANTS = {
    "cuBLAS": Variant(partial(separate, linear=F.linear)),
    "Hopper, separate": Variant(partial(separate, linear=linear)),
    "fused": Variant(fused),
    "2 units": Variant(fused, (("units", 2),)),
    "4 units": Variant(fused, (("units", 4),)),
    "4 units, 32K": Variant(fused, (("units", 4), ("prefetch", 32768))),
    "late 12": Variant(fused, (("late", 12),)),
    "not early": Variant(fused, early=False),
}


def changed(table: ScheduleTable, fields: dict[str, int]) -> ScheduleTable:
    return ScheduleTable(
        {
            key: [replace(each, schedule=replace(each.schedule, **fields)) for each in entries if each.schedule]
            for key, entries in table.entries.items()
        }
    )


def without_gates(table: ScheduleTable) -> ScheduleTable:
    """The same tiles of a gate-up projection that no gate follows: two halves are one block."""
    entries = {}
    for (outputs, inputs, gated), values in table.entries.items():
        wider = [replace(each, schedule=replace(each.schedule, block_n=2 * each.schedule.block_n)) for each in values]
        entries[(1 + gated) * outputs, inputs, False] = wider if gated else values
    return ScheduleTable(entries)


def layer_call(name: str, rows: int, weight: Tensor, block_n: int) -> LinearCall:
    """A random call of a layer with its norm, outputs NaN."""
    outputs, inputs, gated = LLAMA_8B.shapes[name]
    x = torch.randn(rows, inputs, device="cuda", dtype=DTYPE)
    out = torch.full((rows, outputs), torch.nan, device="cuda", dtype=DTYPE)
    if name in ("o", "down"):
        squares = torch.full((rows, -(-outputs // block_n)), torch.nan, device="cuda")
        norm_weight = torch.randn(outputs, device="cuda", dtype=DTYPE)
        behind = NextNorm(norm_weight, torch.full_like(out, torch.nan), squares)
        return LinearCall(x, weight, None, torch.randn_like(out), out, 1, behind=behind)
    squares = x.float().square().unflatten(1, (32, -1)).sum(2)
    return LinearCall(x, weight, None, None, out, 1 + gated, front=DelayedNorm(x, squares, EPS))


def expected_of(call: LinearCall) -> Tensor:
    """The outputs in float64."""
    y = call.x.double() @ call.weight.double().t()
    y = y if call.front is None else y * call.front.factors().double()[:, None]
    if call.parts == 2:
        gate, up = y.chunk(2, dim=1)
        y = F.silu(gate) * up
    return y if call.residual is None else y + call.residual.double()


def wrong(call: LinearCall, schedule: HopperSchedule, expected: Tensor) -> str | None:
    """What is wrong with two runs, or with what the last one left for the norm behind."""
    found = wrong_outputs(call, schedule, expected)
    if found or call.behind is None:
        return found
    weighted, sums = call.out * call.behind.weight, call.out.double().square().sum(1)
    if not torch.equal(call.behind.weighted, weighted):
        return "the weighted outputs are wrong"
    return None if torch.allclose(call.behind.squares.double().sum(1), sums, rtol=1e-5) else "the squares are wrong"


def compile_layer(name: str, rows: int) -> dict[str, str]:
    """In a process of its own: run every candidate once, which leaves it in Triton's cache. Returns what failed."""
    outputs, inputs, gated = LLAMA_8B.shapes[name]
    weight = torch.empty((1 + gated) * outputs, inputs, device="cuda", dtype=DTYPE)
    failures = {}
    for schedule in norm_candidates(rows, gated):
        try:
            launch(layer_call(name, rows, weight, schedule.block_n), schedule)
            torch.cuda.synchronize()
        except Exception as error:
            failures[str(schedule)] = str(error).splitlines()[0]
    return failures


def compile_chain(rows: int, table: ScheduleTable, name: str, tokens: int) -> None:
    """In a process of its own, likewise: a step of one layer."""
    sizes = replace(LLAMA_8B, layers=1)
    mix: Mix = partial(queries_only, hidden=sizes.hidden)
    if tokens:
        mix = random_attention(sizes, rows, tokens, "cuda", DTYPE)
    weights = random_weights(sizes, "cuda", DTYPE)
    variant = VARIANTS[name]
    with variant.chosen(table):
        variant.chain(weights, torch.randn(rows, sizes.hidden, device="cuda", dtype=DTYPE), mix=mix)
    torch.cuda.synchronize()


def best_schedule(name: str, rows: int, weights: list[Tensor], timer: GpuTimer, failures: dict[str, str]) -> Entry:
    """The fastest candidate that is right; prints the times of all."""
    gated = LLAMA_8B.shapes[name][2]
    cold = weights[: -(-COLD_BYTES // (2 * weights[0].numel()))]
    plain = layer_call(name, rows, weights[0], 128)
    expected = expected_of(plain)
    times: dict[HopperSchedule, float] = {}
    for schedule in norm_candidates(rows, gated):
        if str(schedule) not in failures:
            call = layer_call(name, rows, weights[0], schedule.block_n)
            call = replace(call, x=plain.x, front=plain.front, residual=plain.residual)
            problem = wrong(call, schedule, expected)
            if problem is None:
                works = [partial(launch, replace(call, weight=weight), schedule) for weight in cold]
                times[schedule] = timer.replayed(works) / len(cold) * 1e6
                continue
            failures[str(schedule)] = problem
    for schedule, us in sorted(times.items(), key=lambda each: each[1]):
        print(f"| {name} | {rows} | {brief(schedule)} | {us:.2f} |", flush=True)
    for text, reason in failures.items():
        print(f"  {name}, M={rows}: {text}: {reason}", flush=True)
    return Entry(rows, min(times, key=lambda each: times[each]))


def brief(schedule: HopperSchedule) -> str:
    """Block of x, of outputs and inputs, programs, stages, warps."""
    return "-".join(str(getattr(schedule, name)) for name in schedule.__slots__)


def best_table(rows: list[int], weights: Weights, timer: GpuTimer, compilers: ProcessPoolExecutor) -> ScheduleTable:
    """Of every shape and number of rows."""
    cases = [(name, each) for name in LLAMA_8B.shapes for each in rows]
    failures = dict(zip(cases, compilers.map(compile_layer, *zip(*cases, strict=True)), strict=True))
    print("| layer | M | schedule | µs |\n| --- | ---: | --- | ---: |", flush=True)
    entries = {
        shape: [best_schedule(name, each, weights.linears[name], timer, failures[name, each]) for each in rows]
        for name, shape in LLAMA_8B.shapes.items()
    }
    return ScheduleTable(entries)


def check(weights: Weights, rows: int, variant: Variant) -> str:
    """The error of two layers beside that of cuBLAS; RuntimeError where it is much larger, or bits differ."""
    weights, x = weights.first(2), torch.randn(rows, LLAMA_8B.hidden, device="cuda", dtype=DTYPE)
    mix = partial(queries_only, hidden=LLAMA_8B.hidden)
    expected = reference(weights, x, mix)
    first, second = variant.chain(weights, x, mix=mix), variant.chain(weights, x, mix=mix)
    error, usual = (
        float((y.double() - expected).norm() / expected.norm())
        for y in (first, VARIANTS["cuBLAS"].chain(weights, x, mix=mix))
    )
    if not torch.equal(first, second) or not error < 1.5 * usual:
        raise RuntimeError(f"M={rows}: error {error:.5f}, cuBLAS' {usual:.5f}, same bits {torch.equal(first, second)}")
    return f"{error:.5f} ({usual:.5f})"


def time_chains(
    rows: int, table: ScheduleTable, weights: Weights, timer: GpuTimer, args: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of each variant."""
    x = torch.randn(rows, LLAMA_8B.hidden, device="cuda", dtype=DTYPE)
    mix: Mix = partial(queries_only, hidden=LLAMA_8B.hidden)
    if args.attention:
        mix = random_attention(LLAMA_8B, rows, args.tokens, "cuda", DTYPE)
    times = {}
    for name in args.variants:
        variant = VARIANTS[name]
        with variant.chosen(table):
            check(weights, rows, variant)
            times[name] = timer.replayed([partial(variant.chain, weights, x, mix=mix)]) * 1e3
    return times


def main() -> None:
    args = _arguments().parse_args()
    timer = GpuTimer(args.repeats)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()) + "\n", flush=True)
    tokens = args.tokens if args.attention else 0
    weights = random_weights(LLAMA_8B, "cuda", DTYPE)
    figures = {}
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as compilers:
        table = load_table(args.table) if args.table else best_table(args.rows, weights, timer, compilers)
        waits = [
            compilers.submit(compile_chain, each, table, name, tokens) for each in args.rows for name in args.variants
        ]
        for wait in waits:
            wait.result()
        if args.save_table:
            save_table(table, args.save_table)
        what = f"attention to {tokens} tokens a row" if tokens else "no attention"
        print(f"\nStep of {LLAMA_8B.bytes / 1e9:.2f} GB, {what}, ms\n\n| M | " + " | ".join(args.variants) + " |")
        print("| ---: " * (1 + len(args.variants)) + "|", flush=True)
        for each in args.rows:
            figures[each] = time_chains(each, table, weights, timer, args)
            print(f"| {each} | " + " | ".join(f"{ms:.3f}" for ms in figures[each].values()) + " |", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "tokens": tokens, "ms": figures}, indent=1) + "\n")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="M, rows of x, ascending")
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS), help="of the step")
    parser.add_argument("--attention", action="store_true", help="rotary embedding, KV write and attention too")
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence, given --attention")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many replays counts")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--table", type=Path, help="schedules to take, instead of the best ones of this run")
    parser.add_argument("--save-table", type=Path, help="where to write the schedules, for `load_table`")
    parser.add_argument("--json", type=Path, help="where to write the figures of the step")
    return parser


if __name__ == "__main__":
    main()
