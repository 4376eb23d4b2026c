"""Time the elementwise operators of a step: microseconds in a chain of kernels of one CUDA graph, and their bandwidth.

    python kernels/benchmarks/elementwise.py [--rows 1 8 ...] [--only rms_norm ...] [--compile] [--json FILE]

Each kernel of a chain starts when the one before has ended; `early` with programmatic dependent launch, `plain`
without. `beyond` is what `early` takes more than a kernel that does nothing, chained in the same way. GB/s count every
input read and every output written once; `of copy` is their share of a copy of 256 MiB. Inputs rotate among more bytes
than the L2 cache holds, up to 64 sets of them: those of few rows stay there, as activations of a decode step do. With
fewer --sets those of up to some hundreds of rows do.
Results are checked first, their memory poisoned.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from bladellm_kernels import early_launch as early_module
from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from elementwise_cases import OPERATORS, Operator, Sizes
from gpu_timing import GpuTimer, machine
from torch import Tensor

MIB = 2**20
ROTATED_BYTES, MOST_SETS, LEAST_CALLS = 256 * MIB, 64, 32
TITLES = "| operator | rows | early µs | plain µs | beyond µs | GB/s | of copy | torch µs | compiled µs |"


@triton.jit  # type: ignore[untyped-decorator]
def nothing_kernel(counter: tl.tensor, EARLY: tl.constexpr) -> None:
    """A launch and nothing else."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one call."""

    operator: str
    rows: int
    early: float
    plain: float
    nothing: float
    moved: int
    eager: float
    compiled: float | None

    def cells(self, copy: float) -> str:
        speed = self.moved / self.early
        compiled = "" if self.compiled is None else f"{self.compiled * 1e6:.2f}"
        times = f"{self.early * 1e6:.2f} | {self.plain * 1e6:.2f} | {(self.early - self.nothing) * 1e6:.2f}"
        shares = f"{speed / 1e9:,.0f} | {speed / copy:.0%} | {self.eager * 1e6:.2f} | {compiled}"
        return f"| {self.operator} | {self.rows} | {times} | {shares} |"


def chained(timer: GpuTimer, work: Callable[..., object], sets: Sequence[Sequence[Tensor]]) -> float:
    """Seconds of one call in a graph of calls, one after another, of all sets in turn."""
    rounds = -(-LEAST_CALLS // len(sets))
    works = [partial(work, *each) for each in sets] * rounds
    return timer.replayed(works) / len(works)


def without_early_launch(measure: Callable[[], float]) -> float:
    kept = early_module.can_launch_early
    early_module.can_launch_early = lambda device: False  # type: ignore[assignment]
    try:
        return measure()
    finally:
        early_module.can_launch_early = kept


def nothing_seconds(timer: GpuTimer, device: torch.device) -> float:
    """Of one launch that does nothing, in a chain of them."""
    counter = torch.zeros(1, device=device)
    return chained(timer, lambda each: nothing_kernel[(1,)](each, num_warps=1, **early_launch(device)), [(counter,)])


def copy_speed(timer: GpuTimer, device: torch.device) -> float:
    """Bytes a second, read and written, of a plain copy."""
    source, target = (torch.zeros(256 * MIB, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * source.nbytes / chained(timer, lambda a, b: b.copy_(a), [(source, target), (target, source)])


def check(operator: Operator, inputs: Sequence[Tensor]) -> None:
    """Compare the operator with its reference in float32; memory it allocates holds NaN before."""
    expected = operator.reference(*inputs)
    torch.use_deterministic_algorithms(True, warn_only=True)
    actual = operator.ours(*inputs)
    torch.use_deterministic_algorithms(False)
    for result, wanted in zip(actual, expected, strict=True):
        limit = operator.tolerance * wanted.float().abs().amax()
        error = (result.float() - wanted.float()).abs().amax()
        if not bool(error <= limit):
            raise AssertionError(f"{operator.name}: off by {float(error)}, {float(limit)} allowed")


def measure(timer: GpuTimer, operator: Operator, sizes: Sizes, nothing: float, most_sets: int, compile: bool) -> Row:
    first = operator.inputs(sizes)
    check(operator, [each.clone() for each in first])
    moved = operator.moved(sizes)
    count = max(2, min(most_sets, ROTATED_BYTES // moved))
    sets = [first, *(operator.inputs(sizes) for _ in range(count - 1))]
    early = chained(timer, operator.ours, sets)
    plain = without_early_launch(lambda: chained(timer, operator.ours, sets))
    eager = chained(timer, operator.eager, sets)
    compiled = chained(timer, torch.compile(operator.eager, dynamic=False), sets) if compile else None
    return Row(operator.name, sizes.rows, early, plain, nothing, moved, eager, compiled)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1024, 8192])
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--intermediate", type=int, default=14336)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--only", nargs="+", default=list(OPERATORS), choices=list(OPERATORS))
    parser.add_argument("--compile", action="store_true", help="time torch.compile of PyTorch's operators too")
    parser.add_argument("--sets", type=int, default=MOST_SETS, help="most sets of inputs")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    device, timer = torch.device("cuda"), GpuTimer(args.repeats)
    torch.manual_seed(0)
    copy, nothing = copy_speed(timer, device), nothing_seconds(timer, device)
    plain_nothing = without_early_launch(lambda: nothing_seconds(timer, device))
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"\ncopy {copy / 1e9:,.0f} GB/s; nothing {nothing * 1e6:.2f} µs early, {plain_nothing * 1e6:.2f} µs plain\n")
    print(f"{TITLES}\n| --- |" + " ---: |" * 8)
    rows: list[Row] = []
    with torch.inference_mode():
        for name in args.only:
            for count in args.rows:
                sizes = Sizes(count, args.hidden, args.intermediate, args.vocab, device)
                if count > OPERATORS[name].most_rows:
                    continue
                rows.append(measure(timer, OPERATORS[name], sizes, nothing, args.sets, args.compile))
                print(rows[-1].cells(copy), flush=True)
    if args.json is not None:
        figures = {"machine": machine(), "copy_bytes_per_second": copy, "rows": [asdict(row) for row in rows]}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
