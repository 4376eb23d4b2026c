"""Time linear layers of weights in 12 bits a number beside what `linear` takes of the 16-bit weight, on one GPU.

    python kernels/benchmarks/packed_linear.py [--model llama-8b] [--layers qkv o "gate-up, silu · mul" down head]
                                               [--rows 1 8 64] [--repeats 11] [--plain]

For each layer and number of rows: `packed_linear`, and `linear` or `linear_silu_mul`. Times are of a graph that goes
through copies of the weight, more than the L2 cache holds, each launch behind another one; o and down add to their
output, as in a model. `--plain`: nothing is added. Graphs take turns, the median counts. GB/s are of the weight's bytes
that each reads; `of ceiling` is the share of what a kernel that only reads reaches for as many bytes (`ceilings.py`).
Both are checked against float32 first, the output poisoned: one that is wrong has no figures.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from bladellm_kernels.linear import linear, linear_silu_mul
from bladellm_kernels.packed_linear import MAX_ROWS, packed_linear, prepare_kernels, reads_packed
from bladellm_kernels.packed_weight import PackedWeight, pack_weight
from cluster_linear import ERROR, copies, problem_of, start
from cublaslt_candidates import Problem, replayed
from gpu_timing import capture
from linear import ceiling
from linear_step import Shape, models
from torch import Tensor

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
GRAPH_SECONDS = 2e-3
HEADER = "| layer | rows | by | µs | times | GB/s | of ceiling |\n" + "| --- " * 7 + "|"

Operator = Callable[[Tensor, Tensor | None], object]
"""What writes an output, the residual added where there is one."""


@dataclass(frozen=True, slots=True)
class Way:
    """An operator for each copy of the weight, all of so many bytes."""

    name: str
    bytes: int
    operators: Sequence[Operator]

    def row(self, problem: Problem, us: float, linear_us: float) -> str:
        rate = self.bytes / us / 1e6
        figures = f"{us:.2f} | {linear_us / us:.2f} | {rate * 1e3:.0f} | {rate / ceiling(self.bytes):.0%}"
        return f"| {problem.shape.name} | {len(problem.x)} | {self.name} | {figures} |"


def packed_copies(shape: Shape, pool: Tensor) -> list[PackedWeight]:
    """Of the copies of the weight that `problem_of` takes. ValueError where one of them cannot be packed."""
    parts = pool[: copies(shape) * shape.rows * shape.inputs].view(-1, shape.rows, shape.inputs)
    found = [pack_weight(part, shape.gated) for part in parts]
    whole = [packed for packed in found if packed is not None]
    if len(whole) < len(found):
        raise ValueError(f"{shape.name}: {len(found) - len(whole)} weights of {len(found)} cannot be packed")
    return whole


def ways(problem: Problem, packed: Sequence[PackedWeight]) -> list[Way]:
    """By the 16-bit weight, and by the packed one."""
    by_linear = [partial(_by_linear, problem, weight) for weight in problem.weights]
    by_packed = [partial(_by_packed, problem.x, weight) for weight in packed]
    return [Way("linear", problem.shape.bytes, by_linear), Way("packed", packed[0].bytes, by_packed)]


def _by_linear(problem: Problem, weight: Tensor, out: Tensor, residual: Tensor | None) -> None:
    if problem.shape.gated:
        linear_silu_mul(problem.x, weight, out=out)
    else:
        linear(problem.x, weight, out=out, residual=residual)


def _by_packed(x: Tensor, weight: PackedWeight, out: Tensor, residual: Tensor | None) -> None:
    packed_linear(x, weight, out, residual)


def fault_of(problem: Problem, way: Way) -> str | None:
    """What is wrong with two results of the first copy of the weight."""
    residual = torch.randn_like(problem.out) if problem.adds else None
    expected = problem.expected if residual is None else problem.expected + residual.float()
    results = []
    for _ in range(2):
        out = torch.full_like(problem.out, torch.nan)
        way.operators[0](out, residual)
        results.append(out)
    error = float((results[0].float() - expected).norm() / expected.norm())
    if not error < ERROR:
        return f"error {error:.4f}"
    return None if torch.equal(*results) else "other bits each time"


def measure(problem: Problem, packed: Sequence[PackedWeight], repeats: int) -> list[str]:
    """A line of each way, what is wrong in it or its figures; `times` says how much faster it is than `linear`."""
    both = ways(problem, packed)
    faults = [fault_of(problem, way) for way in both]
    lines = [
        f"| {problem.shape.name} | {len(problem.x)} | {way.name} | wrong: {fault} | | | |"
        for way, fault in zip(both, faults, strict=True)
        if fault
    ]
    right = [way for way, fault in zip(both, faults, strict=True) if fault is None]
    graphs = [_graph_of(problem, way) for way in right]
    seconds = replayed([graph for graph, _ in graphs], repeats)
    figures = [found / calls * 1e6 for found, (_, calls) in zip(seconds, graphs, strict=True)]
    linear_us = figures[0] if faults[0] is None else float("nan")
    return lines + [way.row(problem, us, linear_us) for way, us in zip(right, figures, strict=True)]


def _graph_of(problem: Problem, way: Way) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of about so many seconds, and how many calls it has."""
    residual = problem.out if problem.adds else None
    rounds = max(1, round(GRAPH_SECONDS / problem.seconds / len(way.operators)))
    works = [partial(operator, problem.out, residual) for operator in way.operators] * rounds
    return capture(works), len(works)


def layers() -> list[str]:
    """Those whose MLP's gate is applied where it is summed."""
    return [shape.name for shape in models()["llama-8b"].shapes if shape.name != "gate-up"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", choices=list(models()))
    parser.add_argument("--layers", nargs="+", default=layers()[:-1], choices=layers())
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS), choices=range(1, MAX_ROWS + 1), metavar="M")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--plain", action="store_true", help="no layer adds to its output")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, began = arguments(), time.perf_counter()
    shapes, pool = start(args)
    print(f"\n{HEADER}", flush=True)
    for shape in shapes:
        packed = packed_copies(shape, pool)
        problems = [problem_of(shape, rows, pool, args.plain) for rows in sorted(set(args.rows))]
        prepare_kernels(packed[0], args.rows, problems[0].adds)
        for problem in problems:
            if not reads_packed(problem.x, packed[0]):
                raise SystemExit(
                    "packed_linear.py measures a Hopper that takes kernels in CUDA C++: there is none here."
                )
            print("\n".join(measure(problem, packed, args.repeats)), flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
