"""Time the linear layers of a prefill on one GPU under sustained load: every shape by every way, and a whole step.

    python kernels/benchmarks/prefill_linears.py [--rows 1024 8192] [--shapes qkv o gate-up down]
            [--ways linear halves own ...] [--steps now residual ...] [--data zeros]
            [--step_rows 512 8192]

Long matrix products run at the clock that the power limit leaves, which depends on the numbers multiplied: weights and
x are random, and every way is repeated for `--ms` milliseconds; the mean of the second half counts. `MHz, W` is what
nvidia-smi saw meanwhile. `linear`: F.linear; `lt`: by cuBLASLt; `halves`: two halves of the rows one after the other;
`addmm`: the residual as cuBLAS's C, in place; `own`: `many_rows_linear`. Of gate-up SiLU · mul is part of the time, but
not of `product`, F.linear alone; `silu-mul` is the kernel behind it alone.

A step is all layers' norms, activations and linear layers in their order, without attention, by one of `STEPS`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from bladellm_kernels.linear import linear_reference, linear_silu_mul_reference
from bladellm_kernels.many_rows_linear import launch_many_rows
from bladellm_kernels.silu_mul import silu_mul, silu_mul_reference
from gpu_timing import machine
from prefill_linear_step import STEPS, numbers, random_layers, step
from sustained_load import ClockWatch, sustained
from torch import Tensor

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
"""Rows and inputs of the weights of a layer, Llama-3.1-8B."""
GATED = "gate-up"
WEIGHTS, GRAPH_MS = 4, 20.0
TOLERANCE = 2.0**-6


@dataclass(frozen=True, slots=True)
class Problem:
    """x [M, K]; weights [N, K]; residual [M, N], which SiLU · mul alone reads; out [M, N], half as wide where gated: of
    a gate-up projection."""

    x: Tensor
    weights: Sequence[Tensor]
    residual: Tensor
    out: Tensor
    gated: bool


def by_linear(problem: Problem, weight: Tensor) -> Tensor:
    y = F.linear(problem.x, weight)
    return silu_mul(y) if problem.gated else y


def by_product(problem: Problem, weight: Tensor) -> Tensor:
    return F.linear(problem.x, weight)


def by_silu_mul(problem: Problem, weight: Tensor) -> Tensor:
    return silu_mul(problem.residual, out=problem.out)


def by_halves(problem: Problem, weight: Tensor) -> Tensor:
    y = torch.empty(len(problem.x), len(weight), device=weight.device, dtype=problem.x.dtype)
    for rows, result in zip(problem.x.chunk(2), y.chunk(2), strict=True):
        torch.mm(rows, weight.t(), out=result)
    return silu_mul(y) if problem.gated else y


def by_addmm(problem: Problem, weight: Tensor) -> Tensor:
    return torch.addmm(problem.residual, problem.x, weight.t(), out=problem.residual)


def by_own(problem: Problem, weight: Tensor) -> Tensor:
    launch_many_rows(problem.x, weight, problem.out, 1 + problem.gated)
    return problem.out


WAYS: dict[str, Callable[[Problem, Tensor], Tensor]] = {
    "linear": by_linear, "lt": by_linear, "halves": by_halves, "addmm": by_addmm, "own": by_own,
    "product": by_product, "silu-mul": by_silu_mul,
}  # fmt: skip
GATED_ALONE, OTHERS_ALONE = ("product", "silu-mul"), ("addmm",)
"""Ways of the gate-up projection alone, and of the other layers alone."""


def problem_of(outputs: int, inputs: int, rows: int, gated: bool, data: str, device: str = "cuda") -> Problem:
    weights = [numbers(data, outputs, inputs, device=device) * inputs**-0.5 for _ in range(WEIGHTS)]
    x, residual = numbers(data, rows, inputs, device=device), numbers(data, rows, outputs, device=device)
    out = torch.full((rows, outputs // (1 + gated)), torch.nan, device=device, dtype=torch.bfloat16)
    return Problem(x, weights, residual, out, gated)


def applies(way: str, gated: bool) -> bool:
    """Whether a way is one of gate-up projections, or of the other layers."""
    return way not in (OTHERS_ALONE if gated else GATED_ALONE)


def check(problem: Problem, way: str) -> None:
    """Rows here and there against float64. Raises AssertionError."""
    places = torch.randperm(len(problem.x), device=problem.x.device)[:64]
    weight, kept = problem.weights[0], problem.residual.clone()
    found = WAYS[way](problem, weight)[places].double()
    x = problem.x[places]
    whole = problem.gated and way != "product"
    expected = linear_silu_mul_reference(x, weight) if whole else linear_reference(x, weight)
    if way == "silu-mul":
        expected = silu_mul_reference(kept[places]).double()
    if way == "addmm":
        expected += kept[places].double()
        problem.residual.copy_(kept)
    error = ((found - expected).abs() / (1 + expected.abs())).max().item()
    if not error <= TOLERANCE:
        raise AssertionError(f"{way}: off by {error}")


def measure(shape: str, rows: int, ways: Sequence[str], args: argparse.Namespace, watch: ClockWatch) -> None:
    outputs, inputs = SHAPES[shape]
    problem = problem_of(outputs, inputs, rows, shape == GATED, args.data)
    flops = 2.0 * rows * outputs * inputs
    calls = max(1, round(GRAPH_MS / (flops / 700e9)))
    for way in ways:
        if not applies(way, problem.gated):
            continue
        torch.backends.cuda.preferred_blas_library("cublaslt" if way == "lt" else "cublas")
        try:
            check(problem, way)
            works = [partial(WAYS[way], problem, problem.weights[call % WEIGHTS]) for call in range(calls)]
            found = sustained(works, args.ms, watch)
        except Exception as error:
            print(f"| {shape} | {rows} | {way} | {str(error).splitlines()[0]} | | |", flush=True)
            continue
        seconds = found.seconds / calls
        rate = "" if way == "silu-mul" else f"{flops / seconds / 1e12:.0f}"
        print(f"| {shape} | {rows} | {way} | {seconds * 1e6:.1f} | {rate} | {found.clock} |", flush=True)
    torch.backends.cuda.preferred_blas_library("cublas")


def compare_steps(ways: Sequence[str], args: argparse.Namespace, watch: ClockWatch) -> None:
    """Each way in turn, `--rounds` times: the machine warms up meanwhile."""
    counts = args.step_rows or [max(args.rows)]
    whole = random_layers(args.layers, max(counts), SHAPES, args.data)
    numbers_of_row = args.layers * sum(outputs * inputs for outputs, inputs in SHAPES.values())
    print(f"\n| rows of a step, {args.layers} layers | way | ms | TFLOP/s | MHz, W |\n|{' --- |' * 5}", flush=True)
    for rows in counts:
        layers = whole.of_rows(rows)
        for way in [*ways] * args.rounds:
            found = sustained([partial(step, layers, way)], 2 * args.ms, watch)
            rate = 2.0 * rows * numbers_of_row / found.seconds / 1e12
            print(f"| {rows} | {way} | {found.seconds * 1e3:.2f} | {rate:.0f} | {found.clock} |", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=list(STEPS))
    parser.add_argument("--step_rows", nargs="*", type=int, default=[], help="of steps; the most of --rows without")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=2, help="of all steps")
    parser.add_argument("--ms", type=float, default=200.0, help="of each way; twice as long for a step")
    parser.add_argument("--data", choices=("random", "zeros"), default="random")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args = arguments()
    print(", ".join(f"{name}: {value}" for name, value in machine().items()) + f", data: {args.data}\n", flush=True)
    with ClockWatch() as watch:
        if args.shapes:
            print(f"| layer | rows | way | µs | TFLOP/s | MHz, W |\n|{' --- |' * 6}", flush=True)
        for shape in args.shapes:
            for rows in args.rows:
                measure(shape, rows, args.ways, args, watch)
        if args.steps:
            compare_steps(args.steps, args, watch)


if __name__ == "__main__":
    main()
