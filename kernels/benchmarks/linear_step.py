"""All linear layers of a decode step as one CUDA graph, by cuBLAS and by `linear`, with and without fused operators."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from bladellm_kernels import linear_launch
from bladellm_kernels.linear import linear, linear_silu_mul, use_table
from bladellm_kernels.linear_schedules import Entry, HopperSchedule, Schedule, ScheduleTable
from bladellm_kernels.silu_mul import silu_mul
from gpu_timing import GpuTimer
from torch import Tensor

Layer = dict[str, Tensor]
PREFETCHES = (0, 8192, 32768, 65536)
"""Bytes a program prefetches, tried for all layers of the step alike."""

LATES = ((6, 0), (12, 0), (12, 32768), (12, 65536))
"""Tiles to go when the next kernel may start, and bytes as above, likewise; of Hopper schedules."""


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
    """Decoder layers and a head; head_rows: of the vocabulary; attended: outputs of attention, `hidden` where 0."""

    layers: int
    hidden: int
    qkv: int
    inner: int
    head_rows: int
    bias: bool = False
    attended: int = 0
    shapes: list[Shape] = field(init=False)

    def __post_init__(self) -> None:
        shapes = [
            Shape("qkv", self.qkv, self.hidden, self.bias),
            Shape("o", self.hidden, self.queries),
            Shape("gate-up", 2 * self.inner, self.hidden),
            Shape("gate-up, silu · mul", 2 * self.inner, self.hidden, gated=True),
            Shape("down", self.hidden, self.inner),
            Shape("head", self.head_rows, self.hidden),
        ]
        object.__setattr__(self, "shapes", shapes)

    @property
    def queries(self) -> int:
        """Outputs of attention, the inputs of o."""
        return self.attended or self.hidden

    @property
    def bytes(self) -> int:
        """Of all weights."""
        sizes = {shape.name: shape.bytes for shape in self.shapes if not shape.gated}
        return self.layers * sum(sizes.values()) - (self.layers - 1) * sizes["head"]

    def weights(self) -> tuple[list[Layer], Tensor]:
        """Random, of every layer its own."""
        names = {"qkv": "qkv", "o": "o", "gate-up": "gate_up", "down": "down"}
        chosen = [shape for shape in self.shapes if shape.name in names]
        layers = [
            {names[shape.name]: _random(shape.rows, shape.inputs) for shape in chosen} for _ in range(self.layers)
        ]
        return layers, _random(self.head_rows, self.hidden)


def models() -> dict[str, Step]:
    """The shapes of the project's measurements."""
    return {
        "llama-8b": Step(32, 4096, 6144, 14336, 128256),
        "llama-8b-tp2": Step(32, 4096, 3072, 7168, 64128, attended=2048),
        "llama-8b-tp4": Step(32, 4096, 1536, 3584, 32064, attended=1024),
        "qwen-7b": Step(28, 3584, 4608, 18944, 152064, bias=True),
    }


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute the step; early: kernels start before the one in front of them has ended."""

    table: ScheduleTable
    run: Callable[[Step, Tensor, list[Layer], Tensor], Tensor]
    early: bool = True

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Take its schedules and its launches."""
        kept = linear_launch.early_launch
        use_table(self.table)
        if not self.early:
            linear_launch.early_launch = lambda device: {"EARLY": False}
        try:
            yield
        finally:
            linear_launch.early_launch = kept


def ways(model: Step, table: ScheduleTable) -> dict[str, Way]:
    """By name: linear layers alone, then with what stands between them."""
    chosen = [entry.schedule for entries in table.entries.values() for entry in entries if entry.schedule is not None]
    hopper = [isinstance(schedule, HopperSchedule) for schedule in chosen]
    variants: dict[str, dict[str, int]] = {}
    if not all(hopper) or not chosen:
        variants |= {f"prefetch {size // 1024}K": {"prefetch": size} for size in PREFETCHES}
    if any(hopper):
        variants |= {f"late {late}, {size // 1024}K": {"late": late, "prefetch": size} for late, size in LATES}
    return {
        "cuBLAS": Way(table, plain_by_cublas),
        "linear": Way(table, plain),
        "not early": Way(table, plain, early=False),
        **{name: Way(changed(table, model, **fields), plain) for name, fields in variants.items()},
        "cuBLAS, silu · mul, adds": Way(table, whole),
        "fused": Way(table, fused),
    }


def run_way(model: Step, rows: int, way: Way) -> None:
    """Run a step of one layer once: its kernels are in Triton's cache then."""
    layers, head = replace(model, layers=1).weights()
    with way.chosen():
        way.run(model, _input(model, rows), layers, head)
    torch.cuda.synchronize()


def time_step(
    model: Step, rows: list[int], table: ScheduleTable, timer: GpuTimer
) -> Iterator[tuple[int, dict[str, float]]]:
    """Milliseconds of each way to compute the step, for every number of rows."""
    layers, head = model.weights()
    for count in rows:
        x = _input(model, count)
        check(model, x, layers[:2], head, table)
        times = {}
        for name, way in ways(model, table).items():
            with way.chosen():
                times[name] = timer.replayed([partial(way.run, model, x, layers, head)]) * 1e3
        yield count, times


def plain(
    model: Step,
    x: Tensor,
    layers: list[Layer],
    head: Tensor,
    operator: Callable[[Tensor, Tensor], Tensor] = linear,
) -> Tensor:
    """Nothing but the linear layers, each of what the one before gave."""
    for layer in layers:
        qkv = operator(x, layer["qkv"])
        x = operator(qkv[:, : model.queries], layer["o"])
        inner = operator(x, layer["gate_up"])
        x = operator(inner[:, : model.inner], layer["down"])
    return operator(x, head)


def plain_by_cublas(model: Step, x: Tensor, layers: list[Layer], head: Tensor) -> Tensor:
    """The same by torch."""
    return plain(model, x, layers, head, F.linear)


def whole(model: Step, x: Tensor, layers: list[Layer], head: Tensor) -> Tensor:
    """With the residual additions and silu · mul."""
    for layer in layers:
        x = x + F.linear(F.linear(x, layer["qkv"])[:, : model.queries], layer["o"])
        x = x + F.linear(silu_mul(F.linear(x, layer["gate_up"])), layer["down"])
    return F.linear(x, head)


def fused(model: Step, x: Tensor, layers: list[Layer], head: Tensor) -> Tensor:
    """The same, in the kernels of the linear layers."""
    for layer in layers:
        x = linear(linear(x, layer["qkv"])[:, : model.queries], layer["o"], residual=x)
        x = linear(linear_silu_mul(x, layer["gate_up"]), layer["down"], residual=x)
    return linear(x, head)


def check(model: Step, x: Tensor, layers: list[Layer], head: Tensor, table: ScheduleTable) -> None:
    """RuntimeError unless a few layers are about as close to float32 as by torch, with the same bits each time."""
    use_table(table)
    wide = [{name: weight.float() for name, weight in layer.items()} for layer in layers]
    expected = whole(model, x.float(), wide, head.float())
    first, second = fused(model, x, layers, head), fused(model, x, layers, head)
    error, usual = ((y.float() - expected).norm() for y in (first, whole(model, x, layers, head)))
    if not torch.equal(first, second) or not error < 1.5 * usual:
        same = torch.equal(first, second)
        raise RuntimeError(f"M={len(x)}: error {error:.4f}, torch's {usual:.4f}, same bits {same}")


def changed(table: ScheduleTable, model: Step, **fields: int) -> ScheduleTable:
    """The schedules of the model's shapes for every number of rows, with other values of the fields they have."""
    entries = {}
    for shape in model.shapes:
        key = (shape.outputs, shape.inputs, shape.gated)
        found = [(rows, table.choose(rows, *key)) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
        entries[key] = [Entry(rows, _changed(each, fields)) for rows, each in found]
    return ScheduleTable(entries)


def _changed(schedule: Schedule | None, fields: dict[str, int]) -> Schedule | None:
    if schedule is None:
        return None
    return replace(schedule, **{name: value for name, value in fields.items() if hasattr(schedule, name)})


def _input(model: Step, rows: int) -> Tensor:
    return torch.randn(rows, model.hidden, device="cuda", dtype=torch.bfloat16)


def _random(rows: int, inputs: int) -> Tensor:
    return torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16).mul_(inputs**-0.5)
