"""Time products at the clock that the power limit leaves, of operands that powers of two were moved between.

    python kernels/benchmarks/operand_exponents.py [--rows 1280] [--inputs 4096] [--outputs 14336] [--norm 0.02]
                                                   [--weight 0.02] [--shifts 3 4] [--turns 2] [--seconds 0.8]

x is normal numbers times a norm's weight, normal itself, of the spread `--norm`; a weight is normal with the spread
`--weight`. For each shift s both `2**s` times x and `2**-s` times the weights, which is the same product, and either
one alone: by cuBLAS, and gate-up with SiLU · mul by the table's schedule.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import mean

import torch
from bladellm_kernels.linear import linear_silu_mul
from cublaslt_candidates import sustained, sustained_turns
from gpu_timing import machine

Multiply = Callable[[torch.Tensor, torch.Tensor], object]
Operands = tuple[torch.Tensor, list[torch.Tensor]]
"""x [rows, inputs], and weights [2 · outputs, inputs] that it is multiplied by one after the other."""


def scaled(x: torch.Tensor, weights: list[torch.Tensor], shifts: list[int]) -> Iterator[tuple[str, Operands]]:
    """What is timed, and its names; the operands as they are first and last."""
    yield "as they are", (x, weights)
    for shift in shifts:
        up, down = x * 2.0**shift, [weight * 2.0**-shift for weight in weights]
        yield f"x · 2^{shift}, weight · 2^{-shift}", (up, down)
        yield f"x · 2^{shift}", (up, weights)
        yield f"weight · 2^{-shift}", (x, down)
    yield "as they are, again", (x, weights)


def captured(multiply: Multiply, operands: Operands) -> torch.cuda.CUDAGraph:
    """x times each of the weights, once before, so that kernels are loaded."""
    x, weights = operands
    multiply(x, weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            multiply(x, weight)
    return graph


def lines(kind: str, multiply: Multiply, timed: dict[str, Operands], seconds: float, turns: int) -> Iterator[str]:
    """A row of a table for each of the operands."""
    graphs = [captured(multiply, operands) for operands in timed.values()]
    # What comes first in a row of them has another clock than those behind.
    sustained(graphs[:1], seconds)
    spans = sustained_turns(graphs, seconds, turns)
    usual = mean(spans[0] + spans[-1])
    for (name, (_, weights)), own in zip(timed.items(), spans, strict=True):
        time, changes = mean(own) / len(weights), ", ".join(f"{span / usual - 1:+.1%}" for span in own)
        yield f"| {kind} | {name} | {time * 1e6:.1f} | {mean(own) / usual - 1:+.1%} | {changes} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1280, help="M, rows of x")
    parser.add_argument("--inputs", type=int, default=4096, help="K")
    parser.add_argument("--outputs", type=int, default=14336, help="of the gate, as many as of up")
    parser.add_argument("--norm", type=float, default=0.02, help="spread of the norm's weight")
    parser.add_argument("--weight", type=float, default=0.02, help="spread of a weight")
    parser.add_argument("--shifts", nargs="+", type=int, default=[3, 4], help="powers of two")
    parser.add_argument("--weights", type=int, default=5, help="one after the other, more than a cache holds")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=0.8, help="of a turn")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    args, normal = arguments(), partial(torch.randn, device="cuda")
    print(", ".join(f"{name}: {value}" for name, value in machine().items()))
    x = (normal(args.rows, args.inputs) * args.norm * normal(args.inputs)).bfloat16()
    shape = (2 * args.outputs, args.inputs)
    timed = dict(scaled(x, [(normal(shape) * args.weight).bfloat16() for _ in range(args.weights)], args.shifts))
    both = torch.empty(args.rows, 2 * args.outputs, device="cuda", dtype=torch.bfloat16)
    half = torch.empty(args.rows, args.outputs, device="cuda", dtype=torch.bfloat16)
    print("\n| product | operands | µs | change | of turns |\n" + "| --- " * 5 + "|")
    products: dict[str, Multiply] = {
        "cuBLAS": lambda x, weight: torch.mm(x, weight.t(), out=both),
        "gate-up, silu · mul": lambda x, weight: linear_silu_mul(x, weight, out=half),
    }
    for kind, multiply in products.items():
        for line in lines(kind, multiply, timed, args.seconds, args.turns):
            print(line, flush=True)


if __name__ == "__main__":
    main()
