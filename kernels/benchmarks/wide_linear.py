"""Time linear layers of many rows by clusters that share them, beside what `linear` takes, on one GPU.

    python kernels/benchmarks/wide_linear.py [--model llama-8b] [--layers qkv o down "gate-up, silu · mul"]
                                             [--rows 512 1024 8192] [--clusters 1 2] [--groups 1 2 3] [--bands 8 16]
                                             [--stream_k 0 1]
                                             [--copies 3] [--repeats 5] [--seconds 0.3] [--show 3] [--plain]
                                             [--out TABLE]

Of each layer and number of rows: schedules of all groups and clusters, with tiles of 256 rows of x, or of so many that
few tiles have them all, and by Stream-K or not. Times are of a graph that goes through a few copies of the weight; o
and down add to their output, as in a model. `--plain`: nothing is added. In turn: graphs take turns, the median counts,
all share one clock. Of `linear` and the fastest schedules in turn, which are printed: in bursts, after pauses, at the
highest clock; and sustained, each alone for so many seconds, so that its clock is what the power limit leaves it.
TFLOP/s are sustained. A schedule must give what float32 gives but for rounding, and the same bits each time. `--out`:
the shipped table with schedules that save something: in bursts of up to `BURST_ROWS` rows, which come between short
decode steps, and else sustained.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from bladellm_kernels.hopper_parts import has_registers
from bladellm_kernels.linear import measured_table
from bladellm_kernels.linear_schedules import MAX_ROWS, WideSchedule, save_table
from bladellm_kernels.wide_linear import MAX_TOKENS, TOKENS_STEP, launch_wide_linear, source, stages_of
from cluster_linear import ERROR, by_linear, problem_of, start
from cluster_table import with_clusters
from compile_ahead import compile_ahead
from cublaslt_candidates import Problem, Work, after_pauses, graph_of, replayed, sustained
from cublaslt_table import LEAST_GAIN
from linear_step import Shape, models
from torch import Tensor

GRAPH_SECONDS = 5e-3
BURST_ROWS, PAUSE_SECONDS = 1024, 0.02
CACHED_BYTES = 200 << 20
"""More than three times the L2 cache of an H200: so many bytes of copies of a weight, at least."""
MANY_TILES = 8
"""Of rows of x: of so many the last one's padding is little."""


def schedules(shape: Shape, rows: int, args: argparse.Namespace) -> list[WideSchedule]:
    """All choices whose sums fit registers; with Stream-K and without."""
    tall = -(-rows // MAX_TOKENS)
    heights = {-(-rows // (TOKENS_STEP * tiles)) * TOKENS_STEP for tiles in range(tall, tall + 3)} | {128}
    heights = heights if tall <= MANY_TILES else {MAX_TOKENS, 192}
    choices = product(sorted(heights), args.groups, args.clusters, [1] if tall == 1 else args.bands, args.stream_k)
    return [
        WideSchedule(*choice, gated=shape.gated, stream_k=bool(divided))
        for *choice, divided in choices
        if has_registers(*choice[:2])
    ]


def by_wide(problem: Problem, schedule: WideSchedule, weight: Tensor) -> None:
    if not launch_wide_linear(problem.x, weight, problem.out, problem.out if problem.adds else None, schedule):
        raise RuntimeError("kernels in CUDA C++ cannot be compiled here")


def fault_of(problem: Problem, work: Work) -> str | None:
    """What is wrong with the results of a kernel."""
    results = []
    for _ in range(2):
        problem.out.fill_(0.0 if problem.adds else torch.nan)
        work(problem.weights[0])
        results.append(problem.out.clone())
    error = float((results[0].float() - problem.expected).norm() / problem.expected.norm())
    if not error < ERROR:
        return f"error {error:.4f}"
    return None if torch.equal(*results) else "other bits each time"


def described(schedule: WideSchedule) -> str:
    words = f"cluster {schedule.cluster}, tokens {schedule.tokens}, groups {schedule.groups}, band {schedule.band}"
    return f"{words}, stages {stages_of(schedule)}{', stream-k' * schedule.stream_k}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds of a call by a schedule, or by `linear`."""

    schedule: WideSchedule | None
    in_turn: float
    burst: float
    lasting: float

    def line(self, shape: Shape, rows: int) -> str:
        name = "linear" if self.schedule is None else described(self.schedule)
        times = " | ".join(f"{seconds * 1e6:.1f}" for seconds in (self.in_turn, self.burst, self.lasting))
        rate = 2e-12 * rows * shape.rows * shape.inputs / self.lasting
        return f"| {rows} | {shape.name} | {name} | {times} | {rate:.0f} |"

    def seconds(self, rows: int) -> float:
        """What counts for a layer of so many rows."""
        return self.burst if rows <= BURST_ROWS else self.lasting


def timed(problem: Problem, schedules: Sequence[WideSchedule], args: argparse.Namespace) -> list[Figures]:
    """Of `linear`, and of the fastest schedules in turn."""
    works = [partial(by_linear, problem), *(partial(by_wide, problem, schedule) for schedule in schedules)]
    captured = [graph_of(problem, work, GRAPH_SECONDS) for work in works]
    turns = replayed([graph for graph, _ in captured], args.repeats)
    in_turn = [found / count for found, (_, count) in zip(turns, captured, strict=True)]
    shown = [0, *sorted(range(1, len(works)), key=in_turn.__getitem__)[: args.show]]
    graphs = [captured[place][0] for place in shown]
    spans = zip(after_pauses(graphs, args.repeats, PAUSE_SECONDS), sustained(graphs, args.seconds), strict=True)
    found = []
    for place, (burst, lasting) in zip(shown, spans, strict=True):
        calls = captured[place][1]
        found.append(Figures(schedules[place - 1] if place else None, in_turn[place], burst / calls, lasting / calls))
    return found


def measure(
    problem: Problem, choices: Sequence[WideSchedule], args: argparse.Namespace
) -> tuple[list[str], WideSchedule | None]:
    """A line for `linear` and for each of the fastest schedules; the best one, None where it saves next to nothing."""
    shape, rows = problem.shape, len(problem.x)
    compile_ahead((source(schedule, problem.x.dtype, problem.adds) for schedule in choices), "wide_linear.cu")
    faults = {schedule: fault_of(problem, partial(by_wide, problem, schedule)) for schedule in choices}
    lines = [f"| {rows} | {shape.name} | {described(schedule)} | wrong: {fault} | | | |"
             for schedule, fault in faults.items() if fault]  # fmt: skip
    usual, *ours = timed(problem, [schedule for schedule, fault in faults.items() if fault is None], args)
    lines += [figures.line(shape, rows) for figures in (usual, *ours)]
    best = min(ours, key=lambda figures: figures.seconds(rows), default=usual)
    saves = best.seconds(rows) <= (1 - LEAST_GAIN) * usual.seconds(rows)
    return lines, best.schedule if saves else None


def arguments() -> argparse.Namespace:
    names = [shape.name for shape in models()["llama-8b"].shapes if shape.gated or shape.name != "gate-up"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    layers = ["qkv", "o", "down", "gate-up, silu · mul"]
    parser.add_argument("--layers", nargs="+", default=layers, choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=[512, 1024, 8192], help="M, rows of x")
    parser.add_argument("--clusters", nargs="+", type=int, default=[1, 2], choices=(1, 2))
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 3], help="of 64 rows of the weight")
    parser.add_argument("--bands", nargs="+", type=int, default=[8, 16], help="tiles of rows taken together")
    parser.add_argument("--stream_k", nargs="+", type=int, default=[0, 1], choices=(0, 1), help="1: by Stream-K")
    parser.add_argument("--copies", type=int, default=3, help="of the weight, at least")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="that the fastest are replayed alone, twice")
    parser.add_argument("--show", type=int, default=3, help="schedules that are printed")
    parser.add_argument("--plain", action="store_true", help="no layer adds to its output")
    parser.add_argument("--out", type=Path, help="where to write a table, for `load_table`")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, began = arguments(), time.perf_counter()
    shapes, pool = start(args)
    head = "| rows | layer | by | µs in turn | µs in bursts | µs sustained | TFLOP/s |"
    print(f"\n{head}\n" + "| --- " * 7 + "|", flush=True)
    table = measured_table(pool.device)
    for shape in shapes:
        key = shape.outputs, shape.inputs, shape.gated
        # What the table knows of other rows stays, and below those measured, few rows are none of this kernel's.
        chosen: dict[int, WideSchedule | None] = {entry.rows: None for entry in table.entries.get(key, ())}
        chosen[MAX_ROWS] = None
        for rows in sorted(set(args.rows)):
            problem = problem_of(shape, rows, pool, args.plain)
            problem = replace(problem, weights=problem.weights[: max(args.copies, 1 + CACHED_BYTES // shape.bytes)])
            lines, chosen[rows] = measure(problem, schedules(shape, rows, args), args)
            print("\n".join(lines), flush=True)
        table = with_clusters(table, key, chosen)
    if args.out:
        save_table(table, args.out)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
