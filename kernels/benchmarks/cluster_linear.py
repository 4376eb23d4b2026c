"""Time linear layers by clusters under many schedules beside what `linear` takes, on one GPU.

    python kernels/benchmarks/cluster_linear.py [--model llama-8b] [--layers qkv o down] [--rows 128 256]
                                                [--clusters 1 2 4 8] [--launch_at 1 2] [--space 227 112] [--slabs 1 2]
                                                [--hints] [--repeats 11] [--show 6] [--plain]

For each layer and number of rows: schedules of all groups and clusters that take at least half of the multiprocessors
in one wave, with as many stages as so many KiB hold; a kernel of half of an SM's memory may start beside the one in
front of it. Times are of a graph that goes through copies of the weight, more than the L2 cache holds, each launch
behind another one; o and down add to their output, as in a model, by `linear` too. `--plain`: nothing is added. Graphs
take turns, the median counts. Printed are `linear` and the fastest schedules, the best one marked; TB/s are of the
weight. A schedule must give what `linear` gives but for rounding, and the same bits each time.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from bladellm_kernels.cluster_linear import (
    LEAST_STEPS,
    MAX_GROUPS,
    ClusterSchedule,
    default_cluster_schedule,
    has_registers,
    launch_cluster_linear,
    most_stages,
    plan,
)
from bladellm_kernels.linear import linear
from bladellm_kernels.multiprocessors import multiprocessors
from cublaslt_candidates import Problem, graph_of, replayed
from gpu_timing import machine
from linear_step import Shape, models
from torch import Tensor

POOL_BYTES, LEAST_COPIES = 200 << 20, 12
"""More than three times the L2 cache of an H200, and copies of the weight at least."""
GRAPH_SECONDS, ADDING = 2e-3, ("o", "down")
ERROR = 2e-2
"""Of the norm of what `linear` gives: a few roundings."""


def schedules(shape: Shape, rows: int, args: argparse.Namespace) -> list[ClusterSchedule]:
    """All choices; the default one is first."""
    processors = multiprocessors(torch.device("cuda", torch.cuda.current_device()))
    tokens, steps = -(-rows // 8) * 8, -(-shape.inputs // 64)
    found = [default_cluster_schedule(rows, shape.rows, shape.inputs, processors)]
    for groups, cluster in product(range(1, MAX_GROUPS + 1), args.clusters):
        used = -(-shape.rows // (64 * groups)) * cluster
        if not has_registers(tokens, groups) or not processors / 2 <= used <= processors:
            continue
        if steps < LEAST_STEPS // 2 * cluster:
            continue
        hinted = sorted({False, args.hints})
        for space, launch_at, slabs, hints in product(args.space, args.launch_at, args.slabs, hinted):
            stages = min(most_stages(tokens, groups, slabs, space << 10), -(-steps // (cluster * slabs)))
            if stages >= 2:
                found.append(ClusterSchedule(groups, cluster, stages, launch_at, slabs=slabs, hints=hints))
    return list(dict.fromkeys(found))


def problem_of(shape: Shape, rows: int, pool: Tensor, plain: bool) -> Problem:
    """Outputs are about 1 where the pool is about 1 / 64; the copies of the weight are different parts of it."""
    size = shape.rows * shape.inputs
    parts = pool[: copies(shape) * size].view(-1, shape.rows, shape.inputs)
    x = torch.randn(rows, shape.inputs, device=pool.device).mul_(64 * shape.inputs**-0.5).to(pool.dtype)
    out = torch.zeros(rows, shape.rows, device=pool.device, dtype=pool.dtype)
    adds = shape.name in ADDING and not plain
    return Problem(shape, x, list(parts), None, out, adds, x.float() @ parts[0].float().t())


def copies(shape: Shape) -> int:
    return max(LEAST_COPIES, -(-POOL_BYTES // shape.bytes))


def by_linear(problem: Problem, weight: Tensor) -> None:
    linear(problem.x, weight, out=problem.out, residual=problem.out if problem.adds else None)


def by_cluster(problem: Problem, schedule: ClusterSchedule, weight: Tensor) -> None:
    launch_cluster_linear(problem.x, weight, problem.out, problem.out if problem.adds else None, schedule)


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
    planned = plan(rows, shape.rows, schedule)
    words = f"groups {schedule.groups}, cluster {schedule.cluster}, stages {schedule.stages}, launch_at "
    others = f", slabs {schedule.slabs}" * (schedule.slabs > 1) + ", hints" * schedule.hints
    return f"{words}{schedule.launch_at}{others} | {planned.grid} | {planned.shared_bytes >> 10}"


def measure(problem: Problem, choices: Sequence[ClusterSchedule], args: argparse.Namespace) -> list[str]:
    """A line for `linear`, and for each of the fastest schedules."""
    shape, rows = problem.shape, len(problem.x)
    faults = {schedule: fault_of(problem, schedule) for schedule in choices}
    lines = [f"| {rows} | {shape.name} | wrong: {fault} | | {described(schedule, shape, rows)} |"
             for schedule, fault in faults.items() if fault]  # fmt: skip
    right = [schedule for schedule, fault in faults.items() if fault is None]
    works = [partial(by_linear, problem), *(partial(by_cluster, problem, schedule) for schedule in right)]
    graphs = [graph_of(problem, work, GRAPH_SECONDS) for work in works]
    seconds = replayed([graph for graph, _ in graphs], args.repeats)
    figures = [found / calls * 1e6 for found, (_, calls) in zip(seconds, graphs, strict=True)]
    names = ["linear | |", *(described(schedule, shape, rows) + " |" for schedule in right)]
    names = [name + (" default" if place == 1 and right[:1] == choices[:1] else "") for place, name in enumerate(names)]
    best = min(figures)
    ranked = sorted(zip(figures[1:], names[1:], strict=True))
    shown = [(figures[0], names[0]), *ranked[: args.show]]
    shown += [each for each in ranked[args.show :] if each[1].endswith("default")]
    for us, name in shown:
        mark = " **best**" if us == best else ""
        lines.append(f"| {rows} | {shape.name} | {us:.2f} | {shape.bytes / us / 1e6:.2f} | {name}{mark} |")
    return lines


def arguments() -> argparse.Namespace:
    names = [shape.name for shape in models()["llama-8b"].shapes if not shape.gated]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    parser.add_argument("--layers", nargs="+", default=["qkv", "o", "down"], choices=names)
    parser.add_argument("--rows", nargs="+", type=int, default=[128, 256], help="M, rows of x")
    parser.add_argument("--clusters", nargs="+", type=int, default=[1, 2, 4, 8], help="CTAs of a tile")
    parser.add_argument("--launch_at", nargs="+", type=int, default=[1, 2], choices=(0, 1, 2))
    parser.add_argument("--space", nargs="+", type=int, default=[227, 112], help="KiB of shared memory for the ring")
    parser.add_argument("--slabs", nargs="+", type=int, default=[1], help="64 inputs of a stage each")
    parser.add_argument("--hints", action="store_true", help="with hints to the L2 cache, too")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--show", type=int, default=6, help="schedules of a layer that are printed")
    parser.add_argument("--plain", action="store_true", help="no layer adds to its output")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, start = arguments(), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    shapes = [replace(shape, bias=False) for shape in models()[args.model].shapes if shape.name in args.layers]
    pool = torch.randn(
        max(copies(shape) * shape.bytes // 2 for shape in shapes), device="cuda", dtype=torch.bfloat16
    ).mul_(2**-6)
    print("\n| rows | layer | µs | TB/s | by | CTAs | KiB | |\n" + "| --- " * 8 + "|", flush=True)
    for rows, shape in product(sorted(set(args.rows)), shapes):
        problem = problem_of(shape, rows, pool, args.plain)
        for line in measure(problem, schedules(shape, rows, args), args):
            print(line, flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
