"""Measure what a CUDA GPU can do at most, and print one markdown table: the figures other benchmarks are compared with.

    python kernels/benchmarks/ceilings.py [--only read linear ...] [--quick] [--json FILE]

Data are random, sums prove that every word was read, inputs rotate among more bytes than the L2 cache holds, and every
figure is the median of graph replays or of calls in one queue. Where there is a schedule to choose, the best is named.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from gpu_timing import GpuTimer, capture, clocks, machine
from read_kernels import ReadSchedule, read_flat, read_rows, tick
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

MIB = 2**20
POOL_BYTES = 4096 * MIB
POISON = 0x5EEDBAD
FLAT_BYTES = (16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB, POOL_BYTES)
LINEAR_SHAPES = ((128256, 4096), (4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336))
LINEAR_ROWS = (1, 8, 32, 64, 128, 256)
LINEAR_BYTES = 1024 * MIB
ROW_BYTES, ROW_LAYERS, HEAD_BYTES = (512, 1024, 2048, 4096), (1, 4, 8, 32), (256, 128, 64)
MOST_LAYERS = max(ROW_LAYERS)
TINY_NODES, EAGER_CALLS = 1000, 500
HEADER = "| section | case | figure | unit | µs of one | schedule |\n| --- | --- | ---: | --- | ---: | --- |"

Read = Callable[[Tensor, Tensor, ReadSchedule], None]


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. seconds: of one call, launch or graph node."""

    section: str
    case: str
    value: float
    unit: str
    seconds: float
    schedule: str = ""

    def row(self) -> str:
        value = f"{self.value:.3f}" if self.value < 10 else f"{self.value:.1f}"
        return f"| {self.section} | {self.case} | {value} | {self.unit} | {self.seconds * 1e6:.2f} | {self.schedule} |"


@dataclass(frozen=True, slots=True)
class Bench:
    timer: GpuTimer
    rough: GpuTimer
    quick: bool
    sms: int
    device: str = "cuda"

    def pool(self) -> Tensor:
        """int32 [4 GiB / 4] of random bits, far more than any cache."""
        return torch.randint(-(2**31), 2**31, (POOL_BYTES // 4,), dtype=torch.int32, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """bfloat16 numbers."""
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def some(self, values: Sequence[int]) -> Sequence[int]:
        """All of values, or the first and the last of them."""
        return (values[0], values[-1]) if self.quick else values

    def schedules(self, programs: Sequence[int], tiles: Sequence[int], warps: Sequence[int]) -> list[ReadSchedule]:
        """All combinations, with plain loads and with copies ahead; or two of them."""
        if self.quick:
            return [ReadSchedule(each, max(tiles), max(warps)) for each in (2, 4)]
        return [ReadSchedule(*each) for each in product(programs, tiles, warps, (1, 3))]

    def fastest(
        self, parts: list[Tensor], total: int, read: Read, schedules: list[ReadSchedule]
    ) -> tuple[float, ReadSchedule]:
        """Seconds in which one launch after another reads all parts, and the schedule that is fastest at that.

        It is chosen by rough times and measured again, or the luckiest would win. total: sum of the words modulo 2^32.
        """
        rough = {schedule: self._read_time(self.rough, parts, total, read, schedule) for schedule in schedules}
        best = min(rough, key=lambda schedule: rough[schedule])
        return self._read_time(self.timer, parts, total, read, best), best

    def _read_time(self, timer: GpuTimer, parts: list[Tensor], total: int, read: Read, schedule: ReadSchedule) -> float:
        shape = (len(parts), self.sms * schedule.programs_per_sm)
        sums = torch.full(shape, POISON, dtype=torch.int64, device=self.device)
        seconds = timer.replayed([partial(read, part, row, schedule) for part, row in zip(parts, sums, strict=True)])
        if word_sum(sums) != total:
            raise RuntimeError(f"{schedule}: not every word was read once")
        return seconds


def word_sum(words: Tensor) -> int:
    """Modulo 2^32."""
    return int(words.sum(dtype=torch.int64)) % 2**32


def copy(bench: Bench) -> Iterator[Figure]:
    """Bytes read plus bytes written of a device-to-device copy."""
    source, target = bench.pool().view(2, -1)
    target.fill_(POISON)
    # Not in a graph: there it is a node of the copy engines, which reach two thirds of it.
    seconds = bench.timer.queued(lambda: target.copy_(source), calls=4)
    if word_sum(target) != word_sum(source):
        raise RuntimeError("the copy differs from its source")
    yield Figure("copy", "2 GiB, read + written", 2 * source.nbytes / seconds / 1e12, "TB/s", seconds)


def read(bench: Bench) -> Iterator[Figure]:
    """Contiguous bytes read by one launch, launches rotating over 4 GiB."""
    words = bench.pool()
    total = word_sum(words)
    schedules = bench.schedules((1, 2, 4, 8), (2048, 4096, 8192), (4, 8))
    for size in bench.some(FLAT_BYTES):
        parts = list(words.view(-1, size // 4))
        seconds, best = bench.fastest(parts, total, read_flat, schedules)
        seconds /= len(parts)
        yield Figure("read", f"{size // MIB} MiB", size / seconds / 1e12, "TB/s", seconds, str(best))


def read_interleaved(bench: Bench) -> Iterator[Figure]:
    """One layer's rows of 128 MiB read by one launch, where the rows of several layers alternate in memory.

    A program reads one head's bytes of many rows, and the next program the next head's, as attention over a KV cache
    does. Launches go from layer to layer, and all of them read 4 GiB.
    """
    words = bench.pool()
    total = word_sum(words)
    schedules = bench.schedules((2, 4, 8), (2048, 8192), (4,))
    for size, head, layers in product(bench.some(ROW_BYTES), bench.some(HEAD_BYTES), bench.some(ROW_LAYERS)):
        groups = words.view(MOST_LAYERS // layers, -1, layers, size // 4)
        parts = [group[:, layer] for group in groups for layer in range(layers)]
        seconds, best = bench.fastest(parts, total, partial(read_rows, piece_words=head // 4), schedules)
        seconds /= len(parts)
        case = f"rows of {size} bytes, heads of {head}, {layers} layers interleaved"
        yield Figure("rows", case, POOL_BYTES / MOST_LAYERS / seconds / 1e12, "TB/s", seconds, str(best))


def linear(bench: Bench) -> Iterator[Figure]:
    """F.linear over bfloat16 weights that rotate: bytes of weight over time."""
    for n, k in LINEAR_SHAPES:
        copies = max(2, math.ceil(LINEAR_BYTES / (2 * n * k)))
        weights = [bench.normal(n, k) for _ in range(copies)]
        for rows in bench.some(LINEAR_ROWS):
            x = bench.normal(rows, k)
            seconds = bench.timer.replayed([partial(F.linear, x, weight) for weight in weights]) / copies
            yield Figure("linear", f"{n}×{k}, M={rows}", 2 * n * k / seconds / 1e12, "TB/s of weight", seconds)


def matmul(bench: Bench) -> Iterator[Figure]:
    """bfloat16 products of square random matrices."""
    for size in (4096, 8192):
        a, b = bench.normal(2, size, size)
        out = torch.full_like(a, torch.nan)
        seconds = bench.timer.replayed([partial(torch.mm, a, b, out=out)] * 8) / 8
        if not out.isfinite().all():
            raise RuntimeError("the product is not written everywhere")
        yield Figure("matmul", f"{size}³ bf16", 2 * size**3 / seconds / 1e12, "TFLOP/s", seconds)


def sdpa(bench: Bench) -> Iterator[Figure]:
    """Causal attention of one sequence through PyTorch, by back end; half of the square counts."""
    heads, length, width = 32, 8192, 128
    q, k, v = bench.normal(3, 1, heads, length, width)
    flops = 4 * heads * length**2 * width / 2
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            seconds = bench.timer.queued(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), calls=4)
        case = f"{name}, {length}×{heads}×{width} causal bf16"
        yield Figure("sdpa", case, flops / seconds / 1e12, "TFLOP/s", seconds)


def launch(bench: Bench) -> Iterator[Figure]:
    """What a kernel costs that does nothing: in a graph on the GPU, and eagerly on the host."""
    counter = torch.zeros(1, dtype=torch.int32, device=bench.device)

    def add() -> object:
        return counter.add_(1)

    def triton_add() -> None:
        tick(counter)

    for name, work in (("Triton", triton_add), ("torch", add)):
        seconds = bench.timer.replayed([work] * TINY_NODES) / TINY_NODES
        yield Figure("launch", f"graph node, {name}", seconds * 1e6, "µs on the GPU", seconds)
        seconds = bench.timer.host(work, EAGER_CALLS)
        yield Figure("launch", f"eager, {name}", seconds * 1e6, "µs on the host", seconds)
    for nodes in (1, 300, TINY_NODES):
        seconds = bench.timer.host(capture([add] * nodes).replay)
        yield Figure("launch", f"replay of a graph of {nodes} nodes", seconds * 1e6, "µs on the host", seconds)


SECTIONS: dict[str, Callable[[Bench], Iterator[Figure]]] = {
    "copy": copy,
    "read": read,
    "linear": linear,
    "matmul": matmul,
    "launch": launch,
    "sdpa": sdpa,
    "rows": read_interleaved,
}


def measure(bench: Bench, names: list[str]) -> tuple[list[Figure], list[str]]:
    """Print the rows of all sections as they come; the figures, and the sections that failed."""
    figures, failed = [], []
    print(HEADER)
    for name in names:
        start = time.perf_counter()
        try:
            for figure in SECTIONS[name](bench):
                figures.append(figure)
                print(figure.row(), flush=True)
        except Exception:
            # The other sections are worth having.
            traceback.print_exc()
            failed.append(name)
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr)
    return figures, failed


def main() -> None:
    args = _arguments().parse_args()
    if args.device != "cuda" or not torch.cuda.is_available():
        raise SystemExit("ceilings.py measures a CUDA GPU: there is none here, or --device names another device.")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    bench = Bench(GpuTimer(5 if args.quick else 15), GpuTimer(3), args.quick, properties.multi_processor_count)
    facts = machine() | {"clocks before": clocks()}
    print(", ".join(f"{name}: {value}" for name, value in facts.items()) + "\n")
    figures, failed = measure(bench, args.only)
    facts |= {"clocks after": clocks()}
    print(f"\nclocks after: {facts['clocks after']}")
    if args.json:
        result = {"machine": facts, "quick": args.quick, "figures": [asdict(figure) for figure in figures]}
        args.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda; nothing else has such ceilings")
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument("--quick", action="store_true", help="the ends of every list, few schedules, fewer repeats")
    parser.add_argument("--json", type=Path, help="write all figures here too")
    return parser


if __name__ == "__main__":
    main()
