"""All linear layers of a decode step as one CUDA graph, by cuBLAS and by `linear`, with and without fused operators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from bladellm_kernels import linear as module
from bladellm_kernels import linear_launch
from bladellm_kernels.linear import linear, linear_silu_mul, use_table
from bladellm_kernels.linear_schedules import Entry, ScheduleTable
from bladellm_kernels.silu_mul import silu_mul
from gpu_timing import GpuTimer
from torch import Tensor

Layer = dict[str, Tensor]
PREFETCHES = (0, 8192, 32768, 65536)
"""Bytes a program prefetches, tried for all layers of the step alike."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A weight [rows, inputs]; gated: silu · mul of its halves follows and is fused."""

    name: str
    rows: int
    inputs: int
    bias: bool = False
    gated: bool = False

    @property
    def outputs(self) -> int:
        return self.rows // (1 + self.gated)

    @property
    def bytes(self) -> int:
        return 2 * self.rows * self.inputs


@dataclass(frozen=True, slots=True)
class Step:
    """Decoder layers and a head; head_rows: of the vocabulary."""

    layers: int
    hidden: int
    qkv: int
    inner: int
    head_rows: int
    bias: bool = False
    shapes: list[Shape] = field(init=False)

    def __post_init__(self) -> None:
        shapes = [
            Shape("qkv", self.qkv, self.hidden, self.bias),
            Shape("o", self.hidden, self.hidden),
            Shape("gate-up", 2 * self.inner, self.hidden),
            Shape("gate-up, silu · mul", 2 * self.inner, self.hidden, gated=True),
            Shape("down", self.hidden, self.inner),
            Shape("head", self.head_rows, self.hidden),
        ]
        object.__setattr__(self, "shapes", shapes)

    @property
    def bytes(self) -> int:
        """Of all weights."""
        sizes = {shape.name: shape.bytes for shape in self.shapes if not shape.gated}
        return self.layers * sum(sizes.values()) - (self.layers - 1) * sizes["head"]

    def weights(self) -> tuple[list[Layer], Tensor]:
        """Random, of every layer its own."""
        names = {"qkv": "qkv", "o": "o", "gate-up": "gate_up", "down": "down"}
        chosen = [shape for shape in self.shapes if shape.name in names]
        layers = [{names[shape.name]: _random(shape.rows, shape.inputs) for shape in chosen} for _ in range(self.layers)]
        return layers, _random(self.head_rows, self.hidden)


def models() -> dict[str, Step]:
    """The shapes of the project's measurements."""
    return {
        "llama-8b": Step(32, 4096, 6144, 14336, 128256),
        "qwen-7b": Step(28, 3584, 4608, 18944, 152064, bias=True),
    }


def time_step(model: Step, rows: list[int], table: ScheduleTable, timer: GpuTimer) -> Iterator[tuple[int, dict[str, float]]]:
    """Milliseconds of each way to compute the step, for every number of rows."""
    layers, head = model.weights()
    for count in rows:
        x = torch.randn(count, model.hidden, device="cuda", dtype=torch.bfloat16)
        check(model, x, layers[:2], head, table)
        times = {"cuBLAS": timer.replayed([lambda x=x: plain(model, x, layers, head, F.linear)]) * 1e3}
        use_table(table)
        times["linear"] = timer.replayed([lambda x=x: plain(model, x, layers, head, linear)]) * 1e3
        with without_early_launch():
            times["not early"] = timer.replayed([lambda x=x: plain(model, x, layers, head, linear)]) * 1e3
        for size in PREFETCHES:
            use_table(prefetching(table, model, size))
            times[f"prefetch {size // 1024}K"] = timer.replayed([lambda x=x: plain(model, x, layers, head, linear)]) * 1e3
        use_table(table)
        times["cuBLAS, silu · mul, adds"] = timer.replayed([lambda x=x: whole(x, layers, head, model)]) * 1e3
        times["fused"] = timer.replayed([lambda x=x: fused(x, layers, head, model)]) * 1e3
        yield count, times


def plain(model: Step, x: Tensor, layers: list[Layer], head: Tensor, operator: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Nothing but the linear layers, each of what the one before gave."""
    for layer in layers:
        qkv = operator(x, layer["qkv"])
        x = operator(qkv[:, : model.hidden], layer["o"])
        inner = operator(x, layer["gate_up"])
        x = operator(inner[:, : model.inner], layer["down"])
    return operator(x, head)


def whole(x: Tensor, layers: list[Layer], head: Tensor, model: Step) -> Tensor:
    """With the residual additions and silu · mul."""
    for layer in layers:
        x = x + F.linear(F.linear(x, layer["qkv"])[:, : model.hidden], layer["o"])
        x = x + F.linear(silu_mul(F.linear(x, layer["gate_up"])), layer["down"])
    return F.linear(x, head)


def fused(x: Tensor, layers: list[Layer], head: Tensor, model: Step) -> Tensor:
    """The same, in the kernels of the linear layers."""
    for layer in layers:
        x = linear(linear(x, layer["qkv"])[:, : model.hidden], layer["o"], residual=x)
        x = linear(linear_silu_mul(x, layer["gate_up"]), layer["down"], residual=x)
    return linear(x, head)


def check(model: Step, x: Tensor, layers: list[Layer], head: Tensor, table: ScheduleTable) -> None:
    """RuntimeError unless both ways agree on a few layers, and replays give the same bits."""
    use_table(table)
    expected = whole(x.float(), [{k: v.float() for k, v in layer.items()} for layer in layers], head.float(), model)
    first, second = fused(x, layers, head, model), fused(x, layers, head, model)
    error = (first.float() - expected).norm() / expected.norm()
    if not torch.equal(first, second) or not error < 0.02:
        raise RuntimeError(f"M={len(x)}: relative error {error:.4f}, same bits {torch.equal(first, second)}")


def prefetching(table: ScheduleTable, model: Step, size: int) -> ScheduleTable:
    """The schedules of the model's shapes for every number of rows, all with this `prefetch`."""
    entries = {}
    for shape in model.shapes:
        key = (shape.outputs, shape.inputs, shape.gated)
        found = [(rows, table.choose(rows, *key)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
        entries[key] = [Entry(rows, each if each is None else replace(each, prefetch=size)) for rows, each in found]
    return ScheduleTable(entries)


@contextmanager
def without_early_launch() -> Iterator[None]:
    """Every kernel starts when the one before it has ended."""
    kept = linear_launch.early_launch
    linear_launch.early_launch = lambda device: {"EARLY": False}
    try:
        yield
    finally:
        linear_launch.early_launch = kept


def _random(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16).mul_(inputs**-0.5)
