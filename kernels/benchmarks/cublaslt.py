"""Time cuBLASLt's algorithms for linear layers beside what torch takes, and write the table of the best, on one GPU.

    python kernels/benchmarks/cublaslt.py --out TABLE [--model llama-8b] [--rows 32 64 ...] [--layers qkv o ...]
                                          [--seconds 1.4] [--sustained 0.15] [--heuristics_only] [--dtype bfloat16]
                                          [--base TABLE] [--lora SLOTS RANK]

For each layer and number of rows: the algorithms of the library's heuristic, for matrices as they lie and transposed,
the best ones of other numbers of rows, then those beside the best so far, set up otherwise in one place, until
`--seconds` are over; each once, quickly. The best ones and torch are then timed: up to `MAX_ROWS` rows, bound by
memory, in turn; above, bound by power, each alone for `--sustained` seconds, twice: one that needs less power has a
higher clock then. Times are of a graph that goes through copies of the weight, more than the L2 cache holds; layers
that write to the residual stream add to it where torch would, above `MAX_ROWS` rows. An algorithm
must be about as close to float32 as torch, and give the same bits each time, whatever its workspace held. `first` is
the heuristic's own choice, `tried` how many algorithms, with those that were refused. They are named by the numbers of
`cublasLt.h`.

The table has the schedules of `--base`, without it the shipped table, for all other numbers of rows, and its kernels
where they are faster. It is written after every line. With `--lora` the layers' weights have the A of so many adapters
behind them; of numbers of rows that are not measured they have the schedules of the weights alone.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from bladellm_kernels.cublaslt import cublaslt
from bladellm_kernels.cublaslt_library import find_library
from bladellm_kernels.cublaslt_product import CublasLt
from bladellm_kernels.linear import measured_table
from bladellm_kernels.linear_launch import LinearCall, launch
from bladellm_kernels.linear_schedules import (
    MAX_ROWS,
    CublasLtSchedule,
    LinearSchedule,
    Schedule,
    ScheduleTable,
    load_table,
    save_table,
)
from cublaslt_candidates import Problem, Screening, Work, graph_of, replayed, sustained
from cublaslt_table import Choice, merged, step_lines
from gpu_timing import machine
from linear_step import Shape, models
from torch import Tensor

ROWS = (32, 64, 128, 256, 512, 528, 560, 1024, 2048)
POOL_BYTES = 200 << 20
"""More than three times the L2 cache of an H200."""
GRAPH_SECONDS, REPEATS, FINALISTS = 2e-3, 11, 4
SUSTAINED_FINALISTS = 6
ADDING = ("o", "down")
HEADER = "| rows | layer | torch µs | first µs | best µs | gain % | tried | algorithm |\n" + "| --- " * 8 + "|"


SLICES = {"qkv": 3, "o": 1, "gate-up": 2, "down": 1}
"""Of layers that adapters may have."""


def stacked(shapes: Sequence[Shape], slots: int, rank: int, base: ScheduleTable) -> tuple[list[Shape], ScheduleTable]:
    """The layers with A of all slots behind their weights, and the table with what it has of these weights alone."""
    found, entries = [], dict(base.entries)
    for shape in shapes:
        if shape.name in SLICES:
            rows = -(-(shape.rows + slots * rank * SLICES[shape.name]) // 16) * 16
            found.append(replace(shape, rows=rows, bias=False))
            entries.setdefault((rows, shape.inputs, False), base.entries.get((shape.rows, shape.inputs, False), ()))
    return found, ScheduleTable(entries, base.norm_rows)


def copies(shape: Shape) -> int:
    return -(-POOL_BYTES // shape.bytes)


def problem_of(shape: Shape, rows: int, pool: Tensor) -> Problem:
    """Outputs are about 1 where the pool is about 1 / 64; the copies of the weight are different parts of it."""
    size = shape.rows * shape.inputs
    parts = pool[: copies(shape) * size].view(-1, shape.rows, shape.inputs)
    x = torch.randn(rows, shape.inputs, device=pool.device).mul_(64 * shape.inputs**-0.5).to(pool.dtype)
    bias = torch.randn(shape.rows, device=pool.device).to(pool.dtype) if shape.bias else None
    out = torch.zeros(rows, shape.rows, device=pool.device, dtype=pool.dtype)
    expected = x.float() @ parts[0].float().t()
    if bias is not None:
        expected += bias.float()
    adds = shape.name in ADDING and rows > MAX_ROWS and bias is None
    return Problem(shape, x, list(parts), bias, out, adds, expected)


def by_kernel(problem: Problem, schedule: Schedule, weight: Tensor) -> None:
    residual = problem.out if problem.adds else None
    launch(LinearCall(problem.x, weight, problem.bias, residual, problem.out, 1), schedule)


def measure(
    problem: Problem,
    lt: CublasLt,
    today: LinearSchedule | None,
    seeds: Sequence[CublasLtSchedule],
    args: argparse.Namespace,
) -> Choice:
    """Find the fast algorithms, and time them beside torch and the kernel that the table has today."""
    screening, alone = Screening(problem, lt, args.seconds), len(problem.x) > MAX_ROWS
    finalists = screening.run(args.heuristics_only, seeds)[: SUSTAINED_FINALISTS if alone else FINALISTS]
    first = screening.first
    if first is not None and first not in finalists:
        finalists.append(first)
    works: dict[LinearSchedule | None, Work] = {None: problem.by_torch}
    works |= {candidate.schedule: candidate.work(problem) for candidate in finalists}
    if today is not None and not isinstance(today, CublasLtSchedule):
        works[today] = partial(by_kernel, problem, today)
    graphs = [graph_of(problem, work, GRAPH_SECONDS) for work in works.values()]
    replays = [graph for graph, _ in graphs]
    seconds = sustained(replays, args.sustained) if alone else replayed(replays, REPEATS)
    figures = {
        schedule: found / calls * 1e6 for schedule, found, (_, calls) in zip(works, seconds, graphs, strict=True)
    }
    others = {schedule: us for schedule, us in figures.items() if schedule is not None}
    first_us = float("nan") if first is None else others[first.schedule]
    names = {candidate.schedule: candidate.name for candidate in finalists}
    rows, refused = len(problem.x), screening.refused
    return Choice(problem.shape, rows, figures[None], first_us, others, names, screening.tried, refused)


def measure_all(shapes: Sequence[Shape], base: ScheduleTable, args: argparse.Namespace) -> list[Choice]:
    """Every layer and number of rows; prints a line of each, and writes the table so far."""
    library = find_library()
    if library is None:
        sys.exit("No libcublasLt beside torch: install a torch for CUDA.")
    lt = cublaslt(torch.cuda.current_device(), library)
    pool = torch.randn(
        max(copies(shape) * shape.bytes // 2 for shape in shapes), device="cuda", dtype=getattr(torch, args.dtype)
    ).mul_(2**-6)
    print(f"cuBLASLt {library.version}\n\n{HEADER}", flush=True)
    choices = []
    for rows in sorted(set(args.rows)):
        for shape in shapes:
            today = base.choose(rows, shape.rows, shape.inputs)
            best = [today, *(choice.best for choice in reversed(choices) if choice.shape == shape)]
            seeds = [] if args.heuristics_only else [each for each in best if isinstance(each, CublasLtSchedule)]
            choices.append(measure(problem_of(shape, rows, pool), lt, today, seeds, args))
            print(choices[-1].line, flush=True)
            save_table(merged(base, choices), args.out)
    return choices


def arguments() -> argparse.Namespace:
    names = [shape.name for shape in models()["llama-8b"].shapes if not shape.gated]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="where to write the table, for `load_table`")
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="M, rows of x")
    parser.add_argument("--layers", nargs="+", default=names, choices=names)
    parser.add_argument("--seconds", type=float, default=1.4, help="to try algorithms of a layer and number of rows")
    parser.add_argument("--sustained", type=float, default=0.15, help="for each of the best, twice, above 256 rows")
    parser.add_argument("--heuristics_only", action="store_true", help="none but what the library proposes")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--base", type=Path, help="the table that is changed, instead of the shipped one")
    parser.add_argument("--lora", nargs=2, type=int, metavar=("SLOTS", "RANK"), help="adapters behind the weights")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, start = arguments(), time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    print(", ".join(f"{name}: {value}" for name, value in machine().items()), flush=True)
    base = load_table(args.base) if args.base else measured_table(torch.device("cuda", torch.cuda.current_device()))
    model = models()[args.model]
    shapes = [shape for shape in model.shapes if shape.name in args.layers]
    if args.lora:
        shapes, base = stacked(shapes, *args.lora, base)
    choices = measure_all(shapes, base, args)
    print(f"\n{step_lines(choices, model.layers)}\n\n{time.perf_counter() - start:.0f} s; table in {args.out}")


if __name__ == "__main__":
    main()
