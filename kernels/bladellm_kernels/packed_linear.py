"""Linear layers of up to 64 rows on a Hopper, of weights in 12 bits a number (`packed_weight`): by clusters of CTAs.

Such a layer is bound by reading its weight, which is a quarter less then. `packed_linear.cu` is the kernel: copies
bring the bytes to shared memory, warps widen them in registers while the products of the numbers before run, and the
tensor cores take them from there. As in `cluster_linear` a cluster divides the inputs of a tile of outputs and adds up
in shared memory, in one order; the gate of an MLP is applied there, too. Results are those of the 16-bit weight: the
same numbers, summed in float32.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from bladellm_kernels.cuda_compiler import compile_cuda, compile_side_by_side
from bladellm_kernels.cuda_kernel import CudaKernel, KeptLaunches, PreparedLaunch
from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.hopper_parts import (
    GROUP_ROWS,
    ROW_BYTES,
    SHARED_BYTES,
    has_registers,
    held_product_text,
    kernel_text,
    mapped,
    matrices_fit,
    threads_of,
)
from bladellm_kernels.packed_weight import TILE_BYTES, PackedWeight, unpack_weight
from bladellm_kernels.silu_mul import silu_mul_reference

MAX_ROWS = 64
"""Most rows of x for which such a layer is faster: with more of them a step is bound by products, and widening the
weight costs what reading it saves."""
TOKENS = (8, 16, 32, 48, 64)
"""Rows of x in a tile, for which there are kernels."""
MAX_TOKENS = 256
"""Columns of a product of a warpgroup, and rows of a copy."""
MAX_GROUPS, MAX_CLUSTER = 2, 3
"""Consumer warpgroups, and CTAs of a cluster: more of these do not fit an H200 at once (`cluster_linear`)."""

_PRODUCER_WARPS = 2
_HELD_REGISTERS = 32
"""Of a thread: numbers of two tiles."""
_AHEAD_TOKENS = 40
"""Most rows of x in a tile with which two CTAs that widen a tile ahead have registers beside each other. With more rows
those that share an SM with another one do not: on an H200 gate and up of 64 rows take 51.9 µs instead of 58.8. Other
layers, whose CTAs are alone, would take up to a third more."""
_LEAST_FILLED = 84
"""CTAs that two groups are worth, of 132 multiprocessors: fewer of them read too little at once."""
_MULTIPROCESSORS = 132
_WEIGHT_STAGES = 6
"""Tiles of 64 inputs: a CTA takes less than half of the shared memory, so that two kernels find a place beside each
other. Deeper rings delay x, and what the kernel in front still reads: on an H200 a step of one row takes 3.18 ms with
6 stages, 3.36 with as many as fit half of the memory, 3.52 with as many as fit all."""
_FEW_TOKENS = 16
"""Rows of x in a tile for which the next kernel starts behind the last product, not four tiles of x before it: 3.18 ms
instead of 3.27 of one row, 3.42 of 3.50 of 8, but 4.15 of 4.01 of 32."""

_SOURCE = Path(__file__).with_suffix(".cu")
_PARTS = _SOURCE.with_name("cluster_sums.cu"), _SOURCE

_launches = KeptLaunches()


@dataclass(frozen=True, slots=True)
class PackedSchedule:
    """tokens: rows of x in a tile; groups: consumer warpgroups, of 64 rows of the weight each; cluster: CTAs to a tile
    of outputs; stages: tiles of x on their way or in use; weight_stages: the same of the weight. launch_at: when the
    next kernel may start: 0 at once, 1 after the last load of x, 2 after the last product. ahead: a tile is widened
    while the one before is multiplied."""

    tokens: int
    groups: int
    cluster: int
    stages: int
    weight_stages: int
    launch_at: int = 1
    ahead: bool = True


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x · weightᵀ + residual`, or of a gated weight `silu(gate) · up` of it, summed in float32.

    x: [M, K], M up to `MAX_ROWS`; out: [M, N], written where given; residual: [M, N], may be out, none of a gated
    weight; all bfloat16, of the weight's device. Returns [M, N]. By the reference where `reads_packed` says no.
    """
    shape = len(x), weight.outputs
    if x.ndim != 2 or x.shape[1] != weight.inputs:
        raise ValueError(f"x must be [M, {weight.inputs}], got {list(x.shape)}")
    for name, given in (("out", out), ("residual", residual)):
        if given is not None and given.shape != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(given.shape)}")
    if weight.gated and residual is not None:
        raise ValueError("with a gate there is no residual")
    out = x.new_empty(shape) if out is None else out
    schedule = schedule_for(len(x), weight.rows, weight.inputs)
    fits = schedule is not None and reads_packed(x, weight) and matrices_fit(x, out, out, residual)
    if schedule is None or not fits or not launch_packed_linear(x, weight, out, residual, schedule):
        out.copy_(packed_linear_reference(x, weight, residual))
    return out


def packed_linear_reference(
    x: torch.Tensor, weight: PackedWeight, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`packed_linear` in float32. Returns float32."""
    y = F.linear(x.float(), unpack_weight(weight).float())
    if weight.gated:
        return silu_mul_reference(y)
    return y if residual is None else y + residual.float()


def reads_packed(x: torch.Tensor, weight: PackedWeight) -> bool:
    """Whether the kernel is for such a matrix: few rows of it, on a Hopper."""
    return 0 < len(x) <= MAX_ROWS and x.dtype == torch.bfloat16 and on_hopper(x) and kernels_load(x.get_device())


def schedule_for(rows: int, weight_rows: int, inputs: int) -> PackedSchedule | None:
    """The schedule of x [rows, inputs] and a weight of so many rows, None for too many of x."""
    if not 0 < rows <= MAX_ROWS:
        return None
    tokens = next(count for count in TOKENS if count >= rows)
    stages, launch_at = (8, 2) if tokens <= _FEW_TOKENS else (4, 1)
    groups, cluster = _division(weight_rows // GROUP_ROWS, inputs)
    crowded = -(-weight_rows // (GROUP_ROWS * groups)) * cluster > _MULTIPROCESSORS
    ahead = tokens <= _AHEAD_TOKENS or not crowded
    return PackedSchedule(tokens, groups, cluster, stages, _WEIGHT_STAGES, launch_at, ahead)


def _division(tile_rows: int, inputs: int) -> tuple[int, int]:
    """Groups, and CTAs to a tile, so that most multiprocessors have one and none has two in vain."""
    for groups in (2, 1):
        tiles = -(-tile_rows // groups)
        cluster = max(1, min(MAX_CLUSTER, _MULTIPROCESSORS // tiles, inputs // GROUP_ROWS))
        if tiles * cluster >= _LEAST_FILLED:
            return groups, cluster
    return groups, cluster


def shared_bytes(schedule: PackedSchedule) -> int:
    """Of a CTA: its rings, where its sums will lie, and behind them two barriers a stage."""
    return _barriers_at(schedule) + 16 * (schedule.stages + schedule.weight_stages)


def source(schedule: PackedSchedule, gated: bool, residual: bool) -> tuple[str, dict[str, int | str]]:
    """The kernel's text and the macros that it wants."""
    defines: dict[str, int | str] = {
        "TOKENS": schedule.tokens,
        "GROUPS": schedule.groups,
        "STAGES": schedule.stages,
        "WEIGHT_STAGES": schedule.weight_stages,
        "CLUSTER": schedule.cluster,
        "LAUNCH_AT": schedule.launch_at,
        "AHEAD": int(schedule.ahead),
        "HALF": 0,
        "PRODUCER_WARPS": _PRODUCER_WARPS,
        "GATED": int(gated),
        "RESIDUAL": int(residual),
        "PARTIAL_ROW": _partial_row(schedule),
        "BARRIERS_AT": _barriers_at(schedule),
    }
    product = held_product_text(schedule.tokens, torch.bfloat16)
    return product + kernel_text(_PARTS, schedule.tokens, torch.bfloat16), defines


def prepare_kernels(weight: PackedWeight, rows: Sequence[int], residual: bool) -> None:
    """Compile side by side, and load, the kernels for a weight on a Hopper and so many rows of x."""
    if not on_hopper(weight.tiles):
        return
    found = {schedule_for(count, weight.rows, weight.inputs) for count in rows}
    schedules = [schedule for schedule in found if schedule is not None]
    compile_side_by_side([source(schedule, weight.gated, residual) for schedule in schedules], _SOURCE.name)
    for schedule in schedules:
        _kernel(schedule, weight.gated, residual, weight.tiles.get_device())


def launch_packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    schedule: PackedSchedule,
) -> bool:
    """Write what `packed_linear` says to out, on the current stream.

    x, out, residual: `matrices_fit`. The first launch of a schedule compiles the kernel: not while a graph is captured.
    The kernel may start before the one in front has ended, which must not write the weight. Returns False, with nothing
    written and a warning, where the machine cannot compile or load it. Raises ValueError where the schedule does not
    fit.
    """
    residual_at, residual_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    key = (
        *(schedule, x.get_device(), x.shape, x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0)),
        *(weight.tiles.data_ptr(), weight.factors.data_ptr(), weight.rows, weight.gated),
        *(residual_at, residual_stride),
    )
    return _launches.run(key, lambda: _prepare(x, weight, out, residual, schedule))


def _prepare(
    x: torch.Tensor,
    weight: PackedWeight,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    schedule: PackedSchedule,
) -> PreparedLaunch | None:
    _check(len(x), weight.inputs, schedule)
    kernel = _kernel(schedule, weight.gated, residual is not None, x.get_device())
    if kernel is None:
        return None
    grid = -(-weight.rows // (GROUP_ROWS * schedule.groups)) * schedule.cluster
    threads = threads_of(schedule.groups, _PRODUCER_WARPS)
    residual_at, residual_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    return kernel.prepare(
        *((grid, 1, 1), threads, shared_bytes(schedule), schedule.cluster, True),
        *(weight.tiles.data_ptr(), weight.factors.data_ptr(), mapped(x, schedule.tokens), residual_at, out.data_ptr()),
        *(len(x), weight.outputs, weight.inputs, residual_stride, out.stride(0)),
    )


@cache
def _kernel(schedule: PackedSchedule, gated: bool, residual: bool, index: int) -> CudaKernel | None:
    """None, with a warning, where there is no compiler, or none whose kernels the driver takes."""
    text, defines = source(schedule, gated, residual)
    try:
        return CudaKernel(compile_cuda(text, defines, name=_SOURCE.name), "packed_linear", index)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"linear layers of packed weights are left to other kernels: {error}", stacklevel=2)
        return None


@cache
def kernels_load(index: int) -> bool:
    """Whether a device takes these kernels, asked by the smallest of them."""
    return _kernel(PackedSchedule(8, 1, 1, 2, 2), False, False, index) is not None


def _check(rows: int, inputs: int, schedule: PackedSchedule) -> None:
    tokens, groups = schedule.tokens, schedule.groups
    if not 0 < rows <= tokens <= MAX_TOKENS or tokens % 8:
        raise ValueError(f"tokens must be a multiple of 8, from x's {rows} rows to {MAX_TOKENS}, got {tokens}")
    registers = has_registers(tokens, groups, _PRODUCER_WARPS, _HELD_REGISTERS)
    if not 1 <= groups <= MAX_GROUPS or not registers:
        raise ValueError(f"groups must be 1 to {MAX_GROUPS} whose sums of {tokens} tokens fit, got {groups}")
    # A CTA without a tile of the weight would wait for one.
    if not 1 <= schedule.cluster <= min(8, inputs // GROUP_ROWS) or schedule.launch_at not in (0, 1, 2):
        raise ValueError(f"cluster must be 1 to 8, at most a tile of inputs each, launch_at 0 to 2, got {schedule}")
    if min(schedule.stages, schedule.weight_stages) < 2 or shared_bytes(schedule) > SHARED_BYTES:
        raise ValueError(f"stages must be 2 or more that fit {SHARED_BYTES} bytes, got {schedule}")


def _partial_row(schedule: PackedSchedule) -> int:
    return GROUP_ROWS * schedule.groups + 4


def _barriers_at(schedule: PackedSchedule) -> int:
    """Behind the larger of the rings and the sums."""
    rings = schedule.stages * ROW_BYTES * schedule.tokens + schedule.weight_stages * schedule.groups * TILE_BYTES
    return max(rings, 4 * schedule.tokens * _partial_row(schedule))
