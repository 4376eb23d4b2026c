"""Time `linear` beside cuBLAS on one GPU: every shape, number of rows and schedule, and all linear layers of a step.

    python kernels/benchmarks/linear.py [--model llama-8b] [--rows 1 8 64] [--kinds hopper --own]
                                        [--step-only --table TABLE] [--json FILE] [--save-table FILE]

A time of a shape is that of a graph which goes through copies of the weight, more than the L2 cache holds. The step is
one graph of all layers, each with weights of its own and reading what the layer before wrote. `of ceiling` is the share
of what a kernel that only reads reaches for as many bytes (`ceilings.py`). Schedules are checked before they are timed.
"""

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from bladellm_kernels.linear import linear_reference, linear_silu_mul_reference
from bladellm_kernels.linear_launch import LinearCall, launch
from bladellm_kernels.linear_schedules import KINDS, Entry, Schedule, ScheduleTable, load_table, save_table
from bladellm_kernels.silu_mul import silu_mul
from gpu_timing import GpuTimer, machine
from linear_candidates import candidates
from linear_step import Shape, Step, models, run_way, time_step, ways
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
POOL_BYTES = 1 << 30
CEILINGS = ((16 << 20, 2.857), (64 << 20, 3.956), (256 << 20, 4.461), (1 << 30, 4.626))
"""Bytes, TB/s that one launch reads on an H200 (results/ceilings_h200.md)."""
RTOL, ATOL = 2**-7, 4e-3
HEADER = "| layer | N × K | M | schedule | µs | cuBLAS µs | times | TB/s | of ceiling |\n" + "| --- " * 9 + "|"


@dataclass(frozen=True, slots=True)
class Choice:
    """kinds: of schedules to time; own: the table has the best of them even where cuBLAS is faster alone."""

    kinds: Sequence[str] = tuple(KINDS)
    own: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """schedule: our best one, and its us, None if none runs; entry: that or cuBLAS, whichever is faster.

    all_us: of each schedule; failures: why those do not compile or are wrong.
    """

    shape: Shape
    rows: int
    cublas_us: float
    us: float | None
    schedule: str
    entry: Entry
    all_us: dict[str, float]
    failures: dict[str, str]

    @property
    def row(self) -> str:
        best = self.us or self.cublas_us
        rate = self.shape.bytes / best / 1e6
        share = rate / ceiling(self.shape.bytes)
        figures = f"{best:.2f} | {self.cublas_us:.2f} | {self.cublas_us / best:.2f} | {rate:.2f} | {share:.0%}"
        size = f"{self.shape.rows} × {self.shape.inputs}"
        return f"| {self.shape.name} | {size} | {self.rows} | {self.schedule} | {figures} |"


def ceiling(size: float) -> float:
    """TB/s, between the measured sizes linear in the time."""
    times = [(0.0, 1.6), *((each, each / rate / 1e6) for each, rate in CEILINGS)]
    for (low, low_us), (high, high_us) in pairwise(times):
        if size <= high:
            return size / (low_us + (high_us - low_us) * (size - low) / (high - low)) / 1e6
    return CEILINGS[-1][1]


def call_of(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> LinearCall:
    return LinearCall(x, weight, bias, None, out, 1 + shape.gated)


def random_call(shape: Shape, rows: int) -> LinearCall:
    """x and weight such that outputs are about 1; out is NaN."""
    x = torch.randn(rows, shape.inputs, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(shape.rows, shape.inputs, device="cuda", dtype=torch.bfloat16) * shape.inputs**-0.5
    bias = torch.randn(shape.rows, device="cuda", dtype=torch.bfloat16) if shape.bias else None
    out = torch.full((rows, shape.outputs), torch.nan, device="cuda", dtype=torch.bfloat16)
    return call_of(shape, x, weight, bias, out)


def compile_all(shape: Shape, rows: int, kinds: Sequence[str] = tuple(KINDS)) -> dict[str, str]:
    """In a process of its own: run every candidate once, which leaves it in Triton's cache. Returns what failed."""
    failures = {}
    call = random_call(shape, rows)
    for schedule in candidates(rows, shape.gated, kinds):
        try:
            launch(call, schedule)
            torch.cuda.synchronize()
        except Exception as error:
            failures[str(schedule)] = str(error).splitlines()[0]
    return failures


def wrong(call: LinearCall, schedule: Schedule, expected: Tensor) -> str | None:
    """What is wrong with two runs on a poisoned output."""
    results = []
    for _ in range(2):
        call.out.fill_(torch.nan)
        launch(call, schedule)
        results.append(call.out.clone())
    if not torch.equal(*results):
        return "two runs differ"
    error = (results[0].double() - expected).abs()
    if not bool((error <= ATOL + RTOL * expected.abs()).all()):
        return f"wrong by up to {error.max().item()}"
    return None


def measure(shape: Shape, rows: int, pool: Tensor, timer: GpuTimer, failures: dict[str, str], choice: Choice) -> Result:
    """Check and time every candidate and cuBLAS."""
    call = random_call(shape, rows)
    count = max(1, len(pool) // (shape.rows * shape.inputs))
    weights = pool[: count * shape.rows * shape.inputs].view(count, shape.rows, shape.inputs)
    reference = linear_silu_mul_reference if shape.gated else partial(linear_reference, bias=call.bias)
    expected = reference(call.x, call.weight)
    times = {}
    chosen: dict[str, Schedule | None] = {"cuBLAS": None}
    for schedule in candidates(rows, shape.gated, choice.kinds):
        if str(schedule) in failures:
            continue
        problem = wrong(call, schedule, expected)
        if problem is not None:
            failures[str(schedule)] = problem
            continue
        calls = [call_of(shape, call.x, weight, call.bias, call.out) for weight in weights]
        times[str(schedule)] = timer.replayed([partial(launch, each, schedule) for each in calls]) / count * 1e6
        chosen[str(schedule)] = schedule
    plain = [partial(by_cublas, shape, call.x, weight, call.bias) for weight in weights]
    cublas = timer.replayed(plain) / count * 1e6
    best = min(times, key=lambda each: times[each], default="cuBLAS")
    entry = Entry(rows, chosen[best] if choice.own or times.get(best, cublas) < cublas else None)
    return Result(shape, rows, cublas, times.get(best), best, entry, times, failures)


def by_cublas(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = F.linear(x, weight, bias)
    return silu_mul(y) if shape.gated else y


def measure_all(
    shapes: list[Shape], rows: list[int], choice: Choice, timer: GpuTimer, compilers: ProcessPoolExecutor
) -> Iterator[Result]:
    """Compile in parallel, then time one after another."""
    cases = [(shape, each) for shape in shapes for each in rows]
    start = time.perf_counter()
    failures = list(compilers.map(partial(compile_all, kinds=choice.kinds), *zip(*cases, strict=True)))
    print(f"Compiled in {time.perf_counter() - start:.0f} s.\n\n{HEADER}", flush=True)
    size = max(POOL_BYTES, *(shape.bytes for shape in shapes))
    memory = torch.randn(size // 2, device="cuda", dtype=torch.bfloat16).mul_(2**-6)
    for (shape, each), failed in zip(cases, failures, strict=True):
        yield measure(shape, each, memory, timer, failed, choice)


def table_of(results: list[Result]) -> ScheduleTable:
    """The best of every shape and number of rows."""
    entries: dict[tuple[int, int, bool], list[Entry]] = {}
    for result in results:
        entries.setdefault((result.shape.outputs, result.shape.inputs, result.shape.gated), []).append(result.entry)
    return ScheduleTable({key: sorted(values, key=lambda entry: entry.rows) for key, values in entries.items()})


def main() -> None:
    args = _arguments().parse_args()
    timer = GpuTimer(args.repeats)
    model = models()[args.model]
    print(", ".join(f"{name}: {value}" for name, value in machine().items()) + "\n", flush=True)
    results: list[Result] = []
    steps: list[dict[str, object]] = []
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as compilers:
        if not args.step_only:
            for result in measure_all(model.shapes, args.rows, Choice(args.kinds, args.own), timer, compilers):
                print(result.row, flush=True)
                for name, reason in result.failures.items():
                    print(f"  {result.shape.name}, M={result.rows}: {name}: {reason}", flush=True)
                results.append(result)
        table = load_table(args.table) if args.table else table_of(results)
        if args.save_table:
            save_table(table, args.save_table)
        if not args.no_step:
            steps = list(_steps(model, args.rows, table, timer, compilers))
    if args.json:
        text = {"machine": machine(), "results": [asdict(each) for each in results], "steps": steps}
        args.json.write_text(json.dumps(text, indent=1) + "\n")


def _steps(
    model: Step, rows: list[int], table: ScheduleTable, timer: GpuTimer, compilers: ProcessPoolExecutor
) -> Iterator[dict[str, object]]:
    waits = [compilers.submit(run_way, model, each, way) for each in rows for way in ways(model, table).values()]
    for wait in waits:
        wait.result()
    print(f"\nAll linear layers of a step, {model.bytes / 1e9:.2f} GB in one graph; ms (TB/s)\n", flush=True)
    for index, (each, times) in enumerate(time_step(model, rows, table, timer)):
        if index == 0:
            print("| M | " + " | ".join(times) + " |\n" + "| --- " * (len(times) + 1) + "|")
        cells = (f"{ms:.3f} ({model.bytes / ms / 1e9:.2f})" for ms in times.values())
        print(f"| {each} | " + " | ".join(cells) + " |", flush=True)
        yield {"rows": each, "ms": times}


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), help="M, rows of x, ascending")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of schedules to time")
    parser.add_argument("--own", action="store_true", help="no cuBLAS in the table: beside it no layer starts early")
    parser.add_argument("--repeats", type=int, default=10, help="the median of so many replays counts")
    parser.add_argument("--workers", type=int, default=14, help="processes that compile")
    parser.add_argument("--table", type=Path, help="schedules of the step, instead of the best ones of this run")
    parser.add_argument("--step-only", action="store_true", help="time the step alone, by --table or the default rule")
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--save-table", type=Path, help="where to write the best schedules, for `load_table`")
    parser.add_argument("--json", type=Path, help="where to write all figures")
    return parser


if __name__ == "__main__":
    main()
