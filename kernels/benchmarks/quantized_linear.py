"""Time the quantized linear operators beside `F.linear` in bfloat16: `python kernels/benchmarks/quantized_linear.py`.

Every operator of a shape runs once a round, rounds are repeated, and medians are printed: a disturbance of the machine
hits all alike, and no weight stays in the cache because it was the last one used.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from bladellm_kernels.fp8_linear import fp8_linear, pack_fp8
from bladellm_kernels.w4a16_linear import pack_w4a16, w4a16_linear
from bladellm_kernels.w8a8_linear import pack_w8a8, w8a8_linear
from bladellm_kernels.w8a16_linear import pack_w8a16, w8a16_linear
from torch import Tensor

BASELINE = "F.linear bfloat16"
GROUP_SIZE = 128

Linear = Callable[[Tensor], Tensor]


def operators(rows: int, columns: int, device: str) -> Iterator[tuple[str, torch.dtype, float, Linear]]:
    """(name, type of the activations, bytes of the weight, function) of every operator on one random weight."""
    weight = torch.randn(rows, columns, device=device)
    codes = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, device=device)
    channel = torch.rand(rows, 1, device=device)
    group = torch.rand(rows, max(1, columns // GROUP_SIZE), device=device)
    numbers = rows * columns
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        plain = weight.to(dtype)
        yield f"F.linear {name}", dtype, plain.nbytes, lambda x, w=plain: F.linear(x, w)
        w4 = pack_w4a16(codes & 15, group, None, dtype)
        yield f"w4a16 g{GROUP_SIZE} {name}", dtype, numbers / 2, lambda x, w=w4: w4a16_linear(x, w)
        w8 = pack_w8a16(codes, channel, None, dtype)
        yield f"w8a16 channel {name}", dtype, numbers, lambda x, w=w8: w8a16_linear(x, w)
        w8_group = pack_w8a16(codes, group, None, dtype)
        yield f"w8a16 g{GROUP_SIZE} {name}", dtype, numbers, lambda x, w=w8_group: w8a16_linear(x, w)
        w8a8 = pack_w8a8(codes, channel, None, dtype)
        yield f"w8a8 {name}", dtype, numbers, lambda x, w=w8a8: w8a8_linear(x, w)
        fp8 = pack_fp8(weight.to(torch.float8_e4m3fn), channel, dtype)
        yield f"fp8 {name}", dtype, numbers, lambda x, w=fp8: fp8_linear(x, w)
        yield f"fp8 dynamic {name}", dtype, numbers, lambda x, w=fp8: fp8_linear(x, w, activations="dynamic")


def medians(functions: dict[str, Callable[[], Tensor]], seconds: float, device: str) -> dict[str, float]:
    """Median seconds of each function; rounds of all of them until `seconds` are over, at least five."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        function()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[BASELINE]) < 5:
        for name, function in functions.items():
            _wait(device)
            start = time.perf_counter()
            function()
            _wait(device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def measure(rows: int, columns: int, batches: list[int], seconds: float, device: str) -> Iterator[str]:
    """Rows of the table for one weight [rows, columns]."""
    made = list(operators(rows, columns, device))
    for batch in batches:
        inputs = {dtype: torch.randn(batch, columns, device=device).to(dtype) for _, dtype, _, _ in made}
        functions = {name: (lambda f=linear, x=inputs[dtype]: f(x)) for name, dtype, _, linear in made}
        times = medians(functions, seconds, device)
        for name, _, size, _ in made:
            figures = f"{times[name] * 1e6:,.0f} | {times[BASELINE] / times[name]:.2f} | {size / times[name] / 1e9:.1f}"
            yield f"| {name} | {rows} × {columns} | {batch} | {figures} |"


def main() -> None:
    args = _arguments().parse_args()
    torch.set_num_threads(args.threads)
    name = torch.cuda.get_device_name() if args.device == "cuda" else _processor()
    print(f"{name}, {args.threads} threads, torch {torch.__version__}\n")
    print("| operator | N × K | T | µs | times bfloat16 | GB/s of weight |\n| --- | --- | --- | --- | --- | --- |")
    for shape in args.shapes:
        rows, columns = map(int, shape.split("x"))
        for line in measure(rows, columns, args.rows, args.seconds, args.device):
            print(line, flush=True)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--shapes", nargs="+", default=["4096x4096", "14336x4096", "4096x14336", "512x1536"], help="NxK"
    )
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 512], help="T, rows of the input")
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent on each shape and T")
    return parser


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _processor() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return models[0].split(": ")[1] if models else platform.processor()


if __name__ == "__main__":
    main()
