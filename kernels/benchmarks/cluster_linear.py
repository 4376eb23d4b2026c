"""Time linear layers by clusters under many schedules beside what `linear` takes, on one GPU.

    python kernels/benchmarks/cluster_linear.py [--model llama-8b] [--layers qkv o down] [--rows 128 256]
                                                [--clusters 1 2 4 8] [--launch_at 1 2]
                                                [--space 227 112] [--repeats 11] [--show 6] [--plain]
                                                [--out TABLE]

For each layer and number of rows: schedules of all groups and clusters that take at least half of the multiprocessors
in one wave, with as many stages as so many KiB hold; a kernel of half of an SM's memory may start beside the one in
front of it. Times are of a graph that goes through copies of the weight, more than the L2 cache holds, each launch
behind another one; o and down add to their output, as in a model, by `linear` too. `--plain`: nothing is added. Graphs
take turns, the median counts. Printed are `linear` and the fastest schedules, the best one marked; TB/s are of the
weight. A schedule must give what `linear` gives but for rounding, and the same bits each time. `--out`: the shipped
table with the fastest schedules where they are faster.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from bladellm_kernels.cluster_linear import (
    MAX_GROUPS,
    ClusterSchedule,
    has_registers,
    launch_cluster_linear,
    most_stages,
    plan,
    source,
)
from bladellm_kernels.linear import linear, linear_silu_mul, measured_table
from bladellm_kernels.linear_schedules import save_table
from bladellm_kernels.multiprocessors import multiprocessors
from cluster_table import with_clusters
from compile_ahead import compile_ahead
from cublaslt_candidates import Problem, graph_of, replayed
from gpu_timing import machine
from linear_step import Shape, models
from torch import Tensor

POOL_BYTES, LEAST_COPIES = 200 << 20, 12
"""More than three times the L2 cache of an H200, and copies of the weight at least."""
LEAST_STEPS = 4
"""Of 64 inputs, for a CTA that takes a share of them."""
GRAPH_SECONDS, ADDING = 2e-3, ("o", "down")
ERROR = 2e-2
"""Of the norm of what `linear` gives: a few roundings."""


def schedules(shape: Shape, rows: int, args: argparse.Namespace) -> list[ClusterSchedule]:
    """All choices. Their tiles have as many rows as x, padded."""
    processors = multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    tokens, steps = -(-rows // 8) * 8, -(-shape.inputs // 64)
    found = []
    for groups, cluster in product(range(1, MAX_GROUPS + 1), args.clusters):
        used = -(-shape.rows // (64 * groups)) * cluster
        if not has_registers(tokens, groups) or not processors / 2 <= used <= processors:
            continue
        if steps < LEAST_STEPS * cluster:
            continue
        for space, launch_at in product(args.space, args.launch_at):
            stages = min(most_stages(tokens, groups, space << 10), -(-steps // cluster))
            if stages >= 2:
                found.append(ClusterSchedule(groups, cluster, stages, launch_at, tokens))
    return list(dict.fromkeys(found))


def problem_of(shape: Shape, rows: int, pool: Tensor, plain: bool) -> Problem:
    """Outputs are about 1 where the pool is about 1 / 64; the copies of the weight are different parts of it."""
    size = shape.rows * shape.inputs
    parts = pool[: copies(shape) * size].view(-1, shape.rows, shape.inputs)
    x = torch.randn(rows, shape.inputs, device=pool.device).mul_(64 * shape.inputs**-0.5).to(pool.dtype)
    out = torch.zeros(rows, shape.outputs, device=pool.device, dtype=pool.dtype)
    adds = shape.name in ADDING and not plain
    expected = x.float() @ parts[0].float().t()
    if shape.gated:
        gate, up = expected.chunk(2, dim=1)
        expected = torch.nn.functional.silu(gate) * up
    return Problem(shape, x, list(parts), None, out, adds, expected)


def start(args: argparse.Namespace) -> tuple[list[Shape], Tensor]:
    """The layers that were asked for, and random numbers for all copies of the largest weight."""
    torch.backends.cuda.matmul.allow_tf32 = False
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    shapes = [replace(shape, bias=False) for shape in models()[args.model].shapes if shape.name in args.layers]
    numbers = max(copies(shape) * shape.bytes // 2 for shape in shapes)
    return shapes, torch.randn(numbers, device="cuda", dtype=torch.bfloat16).mul_(2**-6)


def copies(shape: Shape) -> int:
    return max(LEAST_COPIES, -(-POOL_BYTES // shape.bytes))


def by_linear(problem: Problem, weight: Tensor) -> None:
    if problem.shape.gated:
        linear_silu_mul(problem.x, weight, out=problem.out)
        return
    linear(problem.x, weight, out=problem.out, residual=problem.out if problem.adds else None)


def by_cluster(problem: Problem, schedule: ClusterSchedule, weight: Tensor) -> None:
    if not launch_cluster_linear(problem.x, weight, problem.out, problem.out if problem.adds else None, schedule):
        raise RuntimeError("kernels in CUDA C++ cannot be compiled here")


def fault_of(problem: Problem, schedule: ClusterSchedule) -> str | None:
    """What is wrong with the results of a schedule."""
    results = []
    for _ in range(2):
        problem.out.zero_()
        by_cluster(problem, schedule, problem.weights[0])
        results.append(problem.out.clone())
    error = float((results[0].float() - problem.expected).norm() / problem.expected.norm())
    if not error < ERROR:
        return f"error {error:.4f}"
    return None if torch.equal(*results) else "other bits each time"


def described(schedule: ClusterSchedule, shape: Shape, rows: int) -> str:
    planned = plan(rows, shape.outputs, schedule)
    words = f"groups {schedule.groups}, cluster {schedule.cluster}, stages {schedule.stages}"
    return f"{words}, launch_at {schedule.launch_at} | {planned.grid} | {planned.shared_bytes >> 10}"


def measure(
    problem: Problem, choices: Sequence[ClusterSchedule], args: argparse.Namespace
) -> tuple[list[str], ClusterSchedule | None]:
    """A line for `linear`, and for each of the fastest schedules; the fastest one, None where `linear` is faster."""
    shape, rows = problem.shape, len(problem.x)
    x_rows = [plan(rows, shape.outputs, schedule).x_box for schedule in choices]
    sources = (source(*choice, problem.x.dtype, problem.adds) for choice in zip(choices, x_rows, strict=True))
    compile_ahead(sources, "cluster_linear.cu")
    faults = {schedule: fault_of(problem, schedule) for schedule in choices}
    lines = [f"| {rows} | {shape.name} | wrong: {fault} | | {described(schedule, shape, rows)} |"
             for schedule, fault in faults.items() if fault]  # fmt: skip
    right = [schedule for schedule, fault in faults.items() if fault is None]
    works = [partial(by_linear, problem), *(partial(by_cluster, problem, schedule) for schedule in right)]
    graphs = [graph_of(problem, work, GRAPH_SECONDS) for work in works]
    seconds = replayed([graph for graph, _ in graphs], args.repeats)
    figures = [found / calls * 1e6 for found, (_, calls) in zip(seconds, graphs, strict=True)]
    names = ["linear | |", *(described(schedule, shape, rows) + " |" for schedule in right)]
    best = min(figures)
    ranked = sorted(zip(figures[1:], names[1:], strict=True))
    shown = [(figures[0], names[0]), *ranked[: args.show]]
    for us, name in shown:
        mark = " **best**" if us == best else ""
        lines.append(f"| {rows} | {shape.name} | {us:.2f} | {shape.bytes / us / 1e6:.2f} | {name}{mark} |")
    return lines, None if best == figures[0] else right[figures.index(best) - 1]


def arguments() -> argparse.Namespace:
    names = [shape.name for shape in models()["llama-8b"].shapes if not shape.gated]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    parser.add_argument("--layers", nargs="+", default=["qkv", "o", "down"], choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 256], help="M, rows of x")
    parser.add_argument("--clusters", nargs="+", type=int, default=[1, 2, 4, 8], help="CTAs of a tile")
    parser.add_argument("--launch_at", nargs="+", type=int, default=[1, 2], choices=(0, 1, 2))
    parser.add_argument("--space", nargs="+", type=int, default=[227, 112], help="KiB of shared memory for the ring")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--show", type=int, default=6, help="schedules of a layer that are printed")
    parser.add_argument("--plain", action="store_true", help="no layer adds to its output")
    parser.add_argument("--out", type=Path, help="where to write a table, for `load_table`")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, began = arguments(), time.perf_counter()
    shapes, pool = start(args)
    print("\n| rows | layer | µs | TB/s | by | CTAs | KiB | |\n" + "| --- " * 8 + "|", flush=True)
    table = measured_table(pool.device)
    for shape in shapes:
        chosen = {}
        for rows in sorted(set(args.rows)):
            problem = problem_of(shape, rows, pool, args.plain)
            lines, chosen[rows] = measure(problem, schedules(shape, rows, args), args)
            print("\n".join(lines), flush=True)
        table = with_clusters(table, (shape.outputs, shape.inputs, shape.gated), chosen)
    if args.out:
        save_table(table, args.out)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
