"""Time the linear layers of a decode step, with all that lies between them, on a Hopper: separate and fused kernels.

    python kernels/benchmarks/fused_layer.py [--rows 1 8 16] [--attention] [--table FILE] [--save-table FILE]
    python kernels/benchmarks/fused_layer.py --light [--rows 1] [--tokens 512] [--tile 256 64 1 3 8]
    python kernels/benchmarks/fused_layer.py --apart --rows 24 32 64 [--tokens 512] [--kernels]

Llama-3.1-8B's shape in bfloat16. Schedules of the layers with norms are checked against float64 and timed one by one,
each over weights of several layers, and the best are taken; or those of a table. Then one CUDA graph a variant: of all
layers and the head, with the norms, residual additions and gates between them; given --attention also with rotary
embedding, KV write and decode attention. Two layers of each variant are checked against float64 before it is timed.
Given --light the fused step, by the default rule for its linear layers, is timed with each schedule of attention that
leaves room beside it (`fused_light.py`: 64-3-4+4.5 has tiles of 64 positions, 3 stages, 4 warps, and programs stay for
4.5 µs), and with attention that fills whole SMs, the layer behind it starting beside it or late. Given --apart steps of
separate kernels are: by cuBLAS, by the table that ships, where linear layers add to the stream (in-place), and where
one of them is the kernel for Hopper (own-o); beside one that is fused. --kernels prints what a profiler sees of each
variant: times of its kernels, and the gaps between one and the next.
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
from bladellm_kernels.decode_schedule import DecodeSchedule, DecodeSetting, default_schedule
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear import linear, use_table
from bladellm_kernels.linear_launch import LinearCall, NextNorm, launch
from bladellm_kernels.linear_schedules import Entry, HopperSchedule, ScheduleTable, load_table, save_table
from bladellm_kernels.normed_linear import use_norms_table
from bladellm_kernels.power_of_two import power_of_two
from fused_candidates import norm_candidates, one_layer_table
from fused_chain import (
    EPS,
    LLAMA_8B,
    Attention,
    Mix,
    Weights,
    fused,
    queries_only,
    random_attention,
    random_weights,
    reference,
    separate,
    separate_in_place,
)
from fused_light import light_schedules, light_table
from gpu_timing import GpuTimer, machine
from kernel_gaps import kernel_gaps
from linear import wrong as wrong_outputs
from torch import Tensor

ROWS = (1, 8, 16, 32, 64, 128)
DTYPE = torch.bfloat16
COLD_BYTES = 512 << 20
"""Weights that one layer's schedule is timed with: several times the L2 cache."""

Chain = Callable[[Weights, Tensor, Mix], Tensor]


@dataclass(frozen=True, slots=True)
class Variant:
    """A chain; fields: of all its schedules, changed; early: kernels of linear layers start before their inputs.
    shipped: `linear` by the table measured on the GPU; own: the one layer that `linear` does not leave to cuBLAS.
    attention: how its work is shared out, None for the default."""

    chain: Chain
    fields: tuple[tuple[str, int], ...] = ()
    early: bool = True
    shipped: bool = False
    own: str | None = None
    attention: DecodeSchedule | None = None

    @contextmanager
    def chosen(self, table: ScheduleTable) -> Iterator[None]:
        """Take its schedules and launches."""
        kept = linear_launch.early_launch
        table = changed(table, dict(self.fields))
        use_norms_table(table)
        tiles = one_layer_table(LLAMA_8B, self.own) if self.own else without_gates(table)
        use_table(None if self.shipped else tiles)
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
    "late 12": Variant(fused, (("late", 12),)),
    "not early": Variant(fused, early=False),
}
APART = {
    "cuBLAS": VARIANTS["cuBLAS"],
    "shipped": Variant(partial(separate, linear=linear), shipped=True),
    "in-place": Variant(partial(separate_in_place, linear=linear), shipped=True),
    **{f"own-{name}": Variant(partial(separate, linear=linear), own=name) for name in LLAMA_8B.shapes},
}
WHOLE = {
    "whole SMs": Variant(fused, attention=default_schedule(128)),
    "whole SMs, late": Variant(fused, attention=default_schedule(128, setting=DecodeSetting(late=True))),
}
LIGHT = {name: Variant(fused, attention=schedule) for name, schedule in light_schedules().items()}
ALL = VARIANTS | APART | WHOLE | LIGHT


def changed(table: ScheduleTable, fields: dict[str, int]) -> ScheduleTable:
    return ScheduleTable(
        {
            key: [replace(each, schedule=replace(each.schedule, **fields)) for each in entries if each.schedule]
            for key, entries in table.entries.items()
        },
        table.norm_rows,
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
    variant = ALL[name]
    if isinstance(mix, Attention) and variant.attention:
        mix = mix.scheduled(variant.attention)
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
    checked = set()
    for name in args.variants:
        variant = ALL[name]
        own = same_attention(mix, variant.attention) if isinstance(mix, Attention) and variant.attention else mix
        with variant.chosen(table):
            if replace(variant, attention=None) not in checked:
                check(weights, rows, variant)
                checked.add(replace(variant, attention=None))
            step = partial(variant.chain, weights, x, mix=own)
            times[name] = timer.replayed([step]) * 1e3
            if args.kernels:
                print("\n".join([f"\nM={rows}, {name}\n", *kernel_gaps(step)]), flush=True)
    return times


def same_attention(attention: Attention, schedule: DecodeSchedule) -> Attention:
    """By this schedule; AssertionError where the outputs of a random layer are others."""
    scheduled = attention.scheduled(schedule)
    width = (LLAMA_8B.heads + 2 * LLAMA_8B.kv_heads) * LLAMA_8B.head_dim
    qkv = torch.randn(len(attention.lengths), width, device="cuda", dtype=DTYPE)
    torch.testing.assert_close(scheduled(qkv, 0), attention(qkv, 0), rtol=2e-2, atol=1e-2)
    return scheduled


def tile_table(rows: list[int], block_n: int, block_k: int, programs: int, stages: int, warps: int) -> ScheduleTable:
    """One tile for all layers; block_n: outputs of both halves where there is a gate."""
    fields = (block_k, programs, stages, warps)
    return ScheduleTable(
        {
            (outputs, inputs, gated): [
                Entry(each, HopperSchedule(max(8, power_of_two(each)), block_n // (1 + gated), *fields))
                for each in rows
            ]
            for outputs, inputs, gated in LLAMA_8B.shapes.values()
        }
    )


def chosen_table(
    args: argparse.Namespace, weights: Weights, timer: GpuTimer, compilers: ProcessPoolExecutor
) -> ScheduleTable:
    """Given, found by trying, or, where other things are compared, the default rule for any number of rows."""
    if args.table:
        return load_table(args.table)
    if args.tile:
        return tile_table(args.rows, *args.tile)
    if args.light or args.apart:
        return ScheduleTable(norm_rows=(1, max(args.rows)))
    return best_table(args.rows, weights, timer, compilers)


def main() -> None:
    args = _arguments().parse_args()
    if args.light or args.apart:
        asked = [
            *(APART if args.apart else ["cuBLAS", "shipped", *WHOLE]),
            *(LIGHT if args.light else ["64-4-4+idle3"]),
        ]
        args.attention, args.variants = True, args.variants or asked
        args.rows = args.rows or [1]
    args.rows, args.variants = args.rows or list(ROWS), args.variants or list(VARIANTS)
    timer = GpuTimer(args.repeats)
    print(", ".join(f"{name}: {value}" for name, value in machine().items()) + "\n", flush=True)
    tokens = args.tokens if args.attention else 0
    weights = random_weights(LLAMA_8B, "cuda", DTYPE)
    figures = {}
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as compilers:
        table = chosen_table(args, weights, timer, compilers)
        waits = [
            compilers.submit(compile_chain, each, table, name, tokens) for each in args.rows for name in args.variants
        ]
        for wait in waits:
            wait.result()
        if args.save_table:
            save_table(table, args.save_table)
        what = f"attention to {tokens} tokens a row" if tokens else "no attention"
        shown = [name for name in args.variants if name not in LIGHT]
        print(f"\nStep of {LLAMA_8B.bytes / 1e9:.2f} GB, {what}, ms\n\n| M | " + " | ".join(shown) + " |")
        print("| ---: " * (1 + len(shown)) + "|", flush=True)
        for each in args.rows:
            figures[each] = time_chains(each, table, weights, timer, args)
            print(f"| {each} | " + " | ".join(f"{figures[each][name]:.3f}" for name in shown) + " |", flush=True)
        for each in args.rows if args.light or args.apart else []:
            print("\n".join([f"\nM={each}, fused, light attention\n", *light_table(figures[each])]), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "tokens": tokens, "ms": figures}, indent=1) + "\n")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, help="M, rows of x, ascending; 1 given --light or --apart")
    parser.add_argument("--variants", nargs="+", choices=list(ALL), metavar="NAME", help="of the step")
    parser.add_argument("--light", action="store_true", help="schedules of attention beside the fused layers, instead")
    parser.add_argument("--apart", action="store_true", help="steps of separate kernels, instead")
    parser.add_argument("--kernels", action="store_true", help="the kernels of each variant and the gaps between them")
    parser.add_argument("--attention", action="store_true", help="rotary embedding, KV write and attention too")
    parser.add_argument("--tokens", type=int, default=512, help="of each sequence, given --attention")
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many replays counts")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--table", type=Path, help="schedules to take, instead of the best ones of this run")
    parser.add_argument("--tile", type=int, nargs=5, help="block_n block_k programs stages warps of all, instead")
    parser.add_argument("--save-table", type=Path, help="where to write the schedules, for `load_table`")
    parser.add_argument("--json", type=Path, help="where to write the figures of the step")
    return parser


if __name__ == "__main__":
    main()
