"""Time the linear layers of a decode step with 4- or 8-bit weights on a GPU, several schedules side by side.

python kernels/benchmarks/unit_linear.py [--bits 4] [--group 128] [--zeros] [--tokens 1 8 64] [--layers 32]
    [--schedules gemv:16,4,4 many:128,32,4,4,3,128 dense:16384] [--no-baseline] [--repeats 9]

Shapes are those of Llama-3-8B. Each figure is one layer's time in a replayed CUDA graph over as many layers as do not
fit the L2 cache; TB/s counts codes and scales; `share` is that of a kernel that only reads (4.63 TB/s). Every schedule
is checked against float32 first, its output poisoned. The last table is a whole step's linear layers in one graph, each
shape with its best schedule and with the default one, and the head in bfloat16.
gemv: rows, warps, steps[, tokens, row warps, programs an SM, registers]. stream: rows, warps,
steps, tiles ahead[, tokens of a program, programs an SM]. many: rows, tokens,
warps, stages, programs an SM, prefetch. dense: rows. ring: outputs, tokens, groups beside each other, stages, steps of
a tile[, groups by turns, programs of a block, 1 to fold scales into codes, stages asked for ahead].
"""

import argparse
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from bladellm_kernels.unit_linear import unit_linear
from bladellm_kernels.unit_schedules import (
    Dense,
    Gemv,
    ManyTokens,
    Ring,
    Schedule,
    Streamed,
    WarpRings,
    unit_schedule,
)
from bladellm_kernels.weight_units import UnitWeight, pack_units
from gpu_timing import GpuTimer, machine

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
HEAD = (128256, 4096)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
READ_BYTES_PER_S = 4.63e12
COLD_BYTES = 256 * 2**20
CANDIDATES = {
    8: "gemv:16,4,4 stream:16,16,2,2 stream:16,16,2,1 stream:16,8,2,2,8,2 ring:64,8,1,9,1,3,2 ring:64,8,4,4,2,1,1",
    16: "gemv:64,4,1,16,2,2 many:128,16,4,4,4,128 stream:16,16,2,1,16 ring:64,16,1,9,1,3,2 ring:64,16,1,8,1,4,2 "
    "ring:64,16,2,8,1,2,4 ring:64,16,4,4,2,1,1 ring:128,16,2,4,2,1,1",
    32: "gemv:64,4,1,32,2,1 many:128,32,8,4,2,128 ring:64,32,1,9,1,3,2 ring:64,32,1,8,1,4,2 ring:64,32,2,8,1,2,4 "
    "ring:64,32,4,4,2,1,1 ring:64,32,4,8,1,1,1 ring:128,32,2,4,2,1,1",
    64: "many:128,64,4,3,2,128 many:128,64,8,4,2,128 ring:64,64,1,6,1,3,2 ring:64,64,1,6,1,3,1 ring:64,64,4,6,1,1,1 "
    "ring:128,64,2,3,2,1,1",
    128: "many:128,64,8,4,2,128 ring:64,64,1,6,1,3,4 ring:64,128,1,4,1,2,1,1 ring:64,128,2,3,1,1,1,1",
    256: "many:128,64,8,4,2,128 ring:64,64,1,6,1,3,4 ring:64,128,1,4,1,2,1,1 ring:64,128,2,3,1,1,1,1",
}
"""Schedules by the largest number of tokens they are meant for."""


@dataclass(slots=True)
class Shape:
    name: str
    rows: int
    columns: int
    layers: list[UnitWeight]
    dense: torch.Tensor
    """The first layer, float32."""

    best: dict[int, Schedule] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        factors = [self.layers[0].scales, self.layers[0].zeros]
        return self.layers[0].codes.nbytes + sum(part.nbytes for part in factors if part is not None)

    def cold(self) -> list[UnitWeight]:
        return self.layers[: max(8, -(-COLD_BYTES // self.bytes))]


def make_shape(name: str, arguments: argparse.Namespace) -> Shape:
    """Random layers of their own numbers."""
    rows, columns = SHAPES[name]
    bits = arguments.bits
    groups = 1 if arguments.group == 0 else columns // arguments.group
    layers, dense = [], torch.empty(0)
    for index in range(arguments.layers):
        codes = torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, device="cuda")
        scales = ((torch.rand(rows, groups, device="cuda") + 0.5) / (2**bits * 16)).bfloat16()
        zeros = torch.randint(0, 2**bits, scales.shape, dtype=torch.uint8, device="cuda") if arguments.zeros else None
        layers.append(pack_units(codes, scales, zeros, bits))
        if index == 0:
            middle = float(2 ** (bits - 1)) if zeros is None else zeros.float().unsqueeze(2)
            values = (codes.float().view(rows, groups, -1) - middle) * scales.float().unsqueeze(2)
            dense = values.view(rows, columns)
    return Shape(name, rows, columns, layers, dense)


KINDS: dict[str, type[Schedule]] = {
    "gemv": Gemv, "stream": Streamed, "many": ManyTokens, "dense": Dense, "ring": Ring, "warps": WarpRings
}  # fmt: skip
"""By the names that candidates begin with."""


def parse_schedule(text: str) -> Schedule:
    kind, _, numbers = text.partition(":")
    values = [int(number) for number in numbers.split(",")]
    return KINDS[kind](*values)


def default_schedule(tokens: int, shape: Shape) -> Schedule:
    return unit_schedule(tokens, *SHAPES[shape.name], fine=shape.layers[0].group_steps < 0)


def schedules(tokens: int, shape: Shape, given: list[str]) -> list[Schedule]:
    """The default one and the candidates for so many tokens."""
    names = given or CANDIDATES[next(most for most in CANDIDATES if tokens <= most)].split()
    made = [parse_schedule(name) for name in names]
    fitting = [
        one for one in [default_schedule(tokens, shape), *made] if not isinstance(one, Gemv) or tokens <= one.tokens
    ]
    return list(dict.fromkeys(fitting))


def compile_all(shapes: list[Shape], arguments: argparse.Namespace) -> None:
    """Run every schedule of every number of tokens once on a layer of each shape, many at a time."""
    wanted = []
    for tokens in arguments.tokens:
        for shape in shapes:
            x = torch.randn(tokens, shape.columns, device="cuda").bfloat16()
            wanted += [(x, shape.layers[0], schedule) for schedule in schedules(tokens, shape, arguments.schedules)]
    with ThreadPoolExecutor(arguments.threads) as pool:
        list(pool.map(lambda job: unit_linear(job[0], job[1], schedule=job[2]), wanted))
    torch.cuda.synchronize()


def worst_error(shape: Shape, x: torch.Tensor, schedule: Schedule) -> float:
    """Largest error beside float32, by the largest output, out poisoned before."""
    y = torch.full((len(x), shape.rows), torch.nan, dtype=x.dtype, device=x.device)
    unit_linear(x, shape.layers[0], out=y, schedule=schedule)
    expected = x.float() @ shape.dense.t()
    return float((y.float() - expected).abs().max() / expected.abs().max())


def measure(shape: Shape, tokens: int, arguments: argparse.Namespace) -> Iterator[str]:
    """Rows of the table, and the best schedule kept in the shape."""
    timer = GpuTimer(arguments.repeats)
    x = torch.randn(tokens, shape.columns, device="cuda").bfloat16()
    y = torch.empty(tokens, shape.rows, dtype=x.dtype, device="cuda")
    best = float("inf")
    layers = shape.cold()
    if not arguments.no_baseline:
        weights = [torch.randn(shape.rows, shape.columns, device="cuda").bfloat16() for _ in range(4)]
        seconds = timer.replayed([lambda w=w: F.linear(x, w) for w in weights * 2]) / 8
        yield f"| {tokens} | {shape.name} | bfloat16, cuBLAS | {seconds * 1e6:.1f} | | | |"
    for schedule in schedules(tokens, shape, arguments.schedules):
        error = worst_error(shape, x, schedule)
        works = [lambda w=w, s=schedule: unit_linear(x, w, out=y, schedule=s) for w in layers]
        seconds = timer.replayed(works) / len(works)
        rate = shape.bytes / seconds
        figures = f"{seconds * 1e6:.1f} | {rate / 1e12:.2f} | {rate / READ_BYTES_PER_S:.0%} | {error:.1e}"
        wrong = "" if error < 1e-2 else " WRONG"
        yield f"| {tokens} | {shape.name} | {schedule} | {figures}{wrong} |"
        if seconds < best and not wrong:
            best, shape.best[tokens] = seconds, schedule


def step_seconds(shapes: list[Shape], tokens: int, head: torch.Tensor, timer: GpuTimer, default: bool) -> float:
    """All linear layers of a step in one graph."""
    inputs = {shape.name: torch.randn(tokens, shape.columns, device="cuda").bfloat16() for shape in shapes}
    outputs = {shape.name: inputs["o"].new_empty(tokens, shape.rows) for shape in shapes}
    works = []
    for layer in range(len(shapes[0].layers)):
        for shape in shapes:
            schedule = default_schedule(tokens, shape) if default else shape.best[tokens]
            x, weight, y = inputs[shape.name], shape.layers[layer], outputs[shape.name]
            works.append(lambda x=x, w=weight, y=y, s=schedule: unit_linear(x, w, out=y, schedule=s))
    works.append(lambda: F.linear(inputs["o"], head))
    return timer.replayed(works)


def main() -> None:
    arguments = parse()
    torch.manual_seed(0)
    print("\n".join(f"{name}: {value}" for name, value in machine().items()))
    start = time.perf_counter()
    shapes = [make_shape(name, arguments) for name in SHAPES]
    torch.cuda.synchronize()
    packed = time.perf_counter() - start
    compile_all(shapes, arguments)
    total = sum(shape.bytes for shape in shapes) * arguments.layers
    print(
        f"packed {total / 1e9:.2f} GB in {packed:.1f} s, kernels made in {time.perf_counter() - start - packed:.1f} s"
    )
    print("\n| tokens | layer | schedule | us | TB/s | share | error |\n| --- | --- | --- | --- | --- | --- | --- |")
    for tokens in arguments.tokens:
        for shape in shapes:
            for line in measure(shape, tokens, arguments):
                print(line, flush=True)
    print(f"\n| tokens | step's linears, best, ms | default, ms | read alone, ms |\n| {'--- | ' * 4}")
    head = torch.randn(HEAD, device="cuda", dtype=torch.bfloat16)
    timer = GpuTimer(arguments.repeats)
    read = (total + head.nbytes) / READ_BYTES_PER_S
    for tokens in arguments.tokens:
        best, default = (step_seconds(shapes, tokens, head, timer, kind) for kind in (False, True))
        print(f"| {tokens} | {best * 1e3:.3f} | {default * 1e3:.3f} | {read * 1e3:.3f} |")
        print(f"  best: {', '.join(f'{shape.name} {shape.best[tokens]}' for shape in shapes)}", flush=True)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=4, choices=(4, 8))
    parser.add_argument("--group", type=int, default=128, help="inputs that share a scale, 0 for a whole row")
    parser.add_argument("--zeros", action="store_true")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--schedules", nargs="+", default=[], help="instead of the candidates of each number of tokens")
    parser.add_argument("--no-baseline", action="store_true", help="leave bfloat16 weights out")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, default=12, help="kernels compiled at a time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
