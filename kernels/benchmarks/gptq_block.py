"""Time `gptq_block` and a whole GPTQ solve.

python kernels/benchmarks/gptq_block.py [--device cuda] [--shape 28672x4096 ...] [--profile]
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bladellm_kernels.gptq_block import ColumnGrid, gptq_block, gptq_block_reference

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.gptq import Gptq
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.hessian import factorise
from bladellm_tools.quantize.algorithms.precision import matmul_precision
from bladellm_tools.quantize.algorithms.statistics import InputStatistics

BLOCK = 128
LLAMA_8B = ("6144x4096", "4096x4096", "28672x4096", "4096x14336")
"""Rows and columns of a decoder layer's four groups: qkv, output, gate_up, down."""
SMALL = ("384x192", "1024x192", "192x512")


@dataclass(frozen=True, slots=True)
class Timer:
    device: torch.device
    repeats: int

    def seconds(self, work: Callable[[], object]) -> float:
        """The least of several runs, after one to warm up."""
        work()
        times = []
        for _ in range(self.repeats):
            self._finish()
            start = time.perf_counter()
            work()
            self._finish()
            times.append(time.perf_counter() - start)
        return min(times)

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def block_times(timer: Timer, rows: int) -> tuple[float, float]:
    """Seconds of one block of 128 columns: the operator, and the loop over columns in plain PyTorch."""
    weight = torch.randn(rows, BLOCK, device=timer.device)
    factor = torch.eye(BLOCK, device=timer.device) + torch.randn(BLOCK, BLOCK, device=timer.device).triu(1) / BLOCK
    scales = torch.rand(1, rows, device=timer.device).t() / 10 + 0.1
    grid = ColumnGrid(scales, None, torch.zeros(BLOCK, dtype=torch.int64, device=timer.device), 4)
    fused = timer.seconds(lambda: gptq_block(weight, factor, grid))
    return fused, timer.seconds(lambda: gptq_block_reference(weight, factor, grid))


def solve_times(timer: Timer, rows: int, columns: int) -> tuple[float, float]:
    """Seconds of the factorisation, and of all of GPTQ with it, at 4 bits and groups of 128 (64 where K is odd)."""
    x = torch.randn(columns // 2, columns, device=timer.device)
    gram = torch.addmm(torch.eye(columns, device=timer.device), x.T, x, alpha=1 / len(x))
    statistics = InputStatistics(gram, gram.diagonal(), gram.diagonal(), len(x))
    weight = torch.randn(rows, columns, device=timer.device)
    gptq = Gptq(Grid(Scheme(4, group_size=128 if columns % 128 == 0 else 64), torch.bfloat16))

    def factor() -> None:
        with matmul_precision("highest"):
            factorise(gram, 0.01)

    return timer.seconds(factor), timer.seconds(lambda: gptq(["module"], [weight], statistics))


def profile(device: torch.device, rows: int, columns: int) -> None:
    """Print where the time of one solve goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    timer = Timer(device, 1)
    with torch.profiler.profile(activities=activities) as profiled:
        solve_times(timer, rows, columns)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiled.key_averages().table(sort_by=order, row_limit=15))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", nargs="+", help="rows x columns, such as 28672x4096")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    timer = Timer(device, arguments.repeats)
    print(f"{'shape':>14} {'block ms':>9} {'loop ms':>9} {'factor s':>9} {'GPTQ s':>9}")
    total = 0.0
    for shape in arguments.shape or (LLAMA_8B if device.type == "cuda" else SMALL):
        rows, columns = (int(part) for part in shape.split("x"))
        fused, loop = block_times(timer, rows)
        factor, whole = solve_times(timer, rows, columns)
        total += whole
        print(f"{shape:>14} {fused * 1e3:9.3f} {loop * 1e3:9.3f} {factor:9.3f} {whole:9.3f}")
        if arguments.profile:
            profile(device, rows, columns)
    print(f"all shapes: {total:.3f} s")


if __name__ == "__main__":
    main()
