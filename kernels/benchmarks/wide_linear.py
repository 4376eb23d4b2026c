"""Time gate-up with its gate for many rows of x by clusters that share them, beside the other kernels, on one GPU.

    python kernels/benchmarks/wide_linear.py [--model llama-8b] [--rows 512 576 640 1024 2048 8192] [--clusters 1 2]
                                             [--tokens 128 192 256] [--groups 1 2] [--bands 4 8 16] [--copies 3]
                                             [--repeats 5] [--seconds 0.3] [--show 8]

`linear` is cuBLAS as the table has it with `silu_mul` behind it, `many rows` the kernel in Triton. Times are of a graph
that goes through a few copies of the weight. In turn: graphs take turns, the median counts, all share one clock.
Sustained: each alone for so many seconds, so that its clock is what the power limit leaves it; by that schedules are
ranked, and the fastest printed. TFLOP/s are sustained. A schedule must give what float32 gives but for rounding, and
the same bits each time.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from bladellm_kernels.hopper_parts import has_registers
from bladellm_kernels.linear import linear
from bladellm_kernels.many_rows_linear import launch_many_rows
from bladellm_kernels.silu_mul import silu_mul
from bladellm_kernels.wide_linear import WideSchedule, launch_wide_linear, stages_of
from cluster_linear import ERROR, copies, problem_of
from cublaslt_candidates import Problem, Work, graph_of, replayed, sustained
from gpu_timing import machine
from linear_step import Shape, models
from torch import Tensor

GRAPH_SECONDS = 5e-3


def schedules(args: argparse.Namespace) -> list[WideSchedule]:
    """All choices whose sums fit registers."""
    choices = product(args.tokens, args.groups, args.clusters, args.bands)
    return [WideSchedule(*choice) for choice in choices if has_registers(*choice[:2])]


def by_linear(problem: Problem, weight: Tensor) -> None:
    silu_mul(linear(problem.x, weight), out=problem.out)


def by_many_rows(problem: Problem, weight: Tensor) -> None:
    launch_many_rows(problem.x, weight, problem.out, 2)


def by_wide(problem: Problem, schedule: WideSchedule, weight: Tensor) -> None:
    if not launch_wide_linear(problem.x, weight, problem.out, None, schedule):
        raise RuntimeError("kernels in CUDA C++ cannot be compiled here")


def fault_of(problem: Problem, work: Work) -> str | None:
    """What is wrong with the results of a kernel."""
    results = []
    for _ in range(2):
        problem.out.fill_(torch.nan)
        work(problem.weights[0])
        results.append(problem.out.clone())
    error = float((results[0].float() - problem.expected).norm() / problem.expected.norm())
    if not error < ERROR:
        return f"error {error:.4f}"
    return None if torch.equal(*results) else "other bits each time"


def described(schedule: WideSchedule) -> str:
    words = f"cluster {schedule.cluster}, tokens {schedule.tokens}, groups {schedule.groups}, band {schedule.band}"
    return f"{words}, stages {stages_of(schedule)}"


def measure(problem: Problem, choices: Sequence[WideSchedule], args: argparse.Namespace) -> list[str]:
    """A line for each of the kernels there are, and for each of the fastest schedules."""
    works: dict[str, Work] = {"linear": partial(by_linear, problem), "many rows": partial(by_many_rows, problem)}
    known = len(works)
    works |= {described(schedule): partial(by_wide, problem, schedule) for schedule in choices}
    faults = {name: fault_of(problem, work) for name, work in works.items()}
    rows = len(problem.x)
    lines = [f"| {rows} | {name} | wrong: {fault} | | |" for name, fault in faults.items() if fault]
    right = [name for name, fault in faults.items() if fault is None]
    captured = [graph_of(problem, works[name], GRAPH_SECONDS) for name in right]
    graphs = [graph for graph, _ in captured]
    found = zip(right, captured, replayed(graphs, args.repeats), sustained(graphs, args.seconds), strict=True)
    figures = {name: (turn / calls * 1e6, alone / calls * 1e6) for name, (_, calls), turn, alone in found}
    ours = sorted((name for name in figures if name in list(works)[known:]), key=lambda name: figures[name][1])
    flops = 2.0 * rows * problem.shape.rows * problem.shape.inputs
    for name in [*(name for name in list(works)[:known] if name in figures), *ours[: args.show]]:
        turn, alone = figures[name]
        lines.append(f"| {rows} | {name} | {turn:.1f} | {alone:.1f} | {flops / alone / 1e6:.0f} |")
    return lines


def gate_up(model: str) -> Shape:
    return next(shape for shape in models()[model].shapes if shape.gated)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    rows = [512, 576, 640, 1024, 2048, 8192]
    parser.add_argument("--rows", nargs="+", type=int, default=rows, help="M, rows of x")
    parser.add_argument("--clusters", nargs="+", type=int, default=[1, 2], choices=(1, 2))
    parser.add_argument("--tokens", nargs="+", type=int, default=[128, 192, 256], help="rows of x in a tile")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2], help="of 64 rows of the weight")
    parser.add_argument("--bands", nargs="+", type=int, default=[4, 8, 16], help="tiles of rows taken together")
    parser.add_argument("--copies", type=int, default=3, help="of the weight")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="that each is replayed alone, twice")
    parser.add_argument("--show", type=int, default=8, help="schedules that are printed")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, start = arguments(), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    shape = replace(gate_up(args.model), bias=False)
    pool = torch.randn(copies(shape) * shape.bytes // 2, device="cuda", dtype=torch.bfloat16).mul_(2**-6)
    print("\n| rows | by | µs in turn | µs sustained | TFLOP/s |\n" + "| --- " * 5 + "|", flush=True)
    for rows in sorted(set(args.rows)):
        problem = problem_of(shape, rows, pool, True)
        problem = replace(problem, weights=problem.weights[: args.copies])
        print("\n".join(measure(problem, schedules(args), args)), flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
