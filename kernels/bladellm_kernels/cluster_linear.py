"""Linear layers of 16 to 256 rows on a Hopper: inputs divided among a cluster, whose CTAs add up in shared memory.

Such a layer is bound by reading its weight, and has too few tiles of outputs for all multiprocessors: the inputs of
each are divided. `cluster_linear.cu` is the kernel. The weight is the left operand of the tensor cores, 64 outputs to a
warpgroup, x the right one, so that its rows are padded to a multiple of 8 at most. It reads the weight ahead while the
kernel in front of it ends. Sums are float32, added up in one order; no atomics, so that results do not vary.
"""

import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from bladellm_kernels.cuda_compiler import compile_cuda
from bladellm_kernels.cuda_kernel import CudaKernel, KeptLaunches, PreparedLaunch
from bladellm_kernels.hopper_parts import (
    GROUP_ROWS,
    ROW_BYTES,
    SHARED_BYTES,
    has_registers,
    kernel_text,
    mapped,
    threads_of,
)
from bladellm_kernels.linear_schedules import ClusterSchedule

MAX_TOKENS = 256
"""Rows of x that one tile can have: columns of a product of a warpgroup, and rows of a copy."""
MAX_GROUPS = 4
"""Consumer warpgroups: 256 rows of the weight, the most of a copy."""
MAX_CLUSTER = 8
"""CTAs of a cluster that every launch may have. On an H200 32 clusters of four do not fit at once: each lies in one
part of the GPU, and some parts presumably have two multiprocessors left."""

_SOURCE = Path(__file__).with_suffix(".cu")
_PARTS = _SOURCE.with_name("cluster_sums.cu"), _SOURCE

_launches = KeptLaunches()


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What a launch needs. threads: of a CTA; boxes: rows of a copy, each of 64 inputs."""

    grid: int
    cluster: int
    threads: int
    shared_bytes: int
    weight_box: int
    x_box: int


def padded_tokens(rows: int, schedule: ClusterSchedule) -> int:
    """Rows of x in a tile."""
    return -(-rows // 8) * 8 if schedule.tokens is None else schedule.tokens


def plan(rows: int, outputs: int, schedule: ClusterSchedule) -> ClusterPlan:
    """The launch of x [rows, K] and a weight of so many outputs. Raises ValueError saying what does not fit."""
    tokens = padded_tokens(rows, schedule)
    _check(rows, tokens, schedule)
    grid = -(-outputs // tile_outputs(schedule)) * schedule.cluster
    shared = shared_bytes(tokens, schedule)
    box = GROUP_ROWS * schedule.groups
    return ClusterPlan(grid, schedule.cluster, threads_of(schedule.groups), shared, box, tokens)


def source(
    schedule: ClusterSchedule, tokens: int, dtype: torch.dtype, residual: bool
) -> tuple[str, dict[str, int | str]]:
    """The kernel's text and the macros that it wants."""
    defines: dict[str, int | str] = {
        "TOKENS": tokens,
        "GROUPS": schedule.groups,
        "STAGES": schedule.stages,
        "CLUSTER": schedule.cluster,
        "LAUNCH_AT": schedule.launch_at,
        "HALF": int(dtype == torch.float16),
        "GATED": 0,
        "RESIDUAL": int(residual),
        "PARTIAL_ROW": _partial_row(schedule),
        "BARRIERS_AT": _barriers_at(tokens, schedule),
    }
    return kernel_text(_PARTS, tokens, dtype), defines


def shared_bytes(tokens: int, schedule: ClusterSchedule) -> int:
    """Of a CTA: its ring, where its sums will lie, and behind them two barriers a stage."""
    return _barriers_at(tokens, schedule) + 16 * schedule.stages


def tile_outputs(schedule: ClusterSchedule) -> int:
    """Of a CTA."""
    return GROUP_ROWS * schedule.groups


def stage_bytes(tokens: int, groups: int) -> int:
    return ROW_BYTES * (GROUP_ROWS * groups + tokens)


def most_stages(tokens: int, groups: int, space: int = SHARED_BYTES) -> int:
    """Stages for which so many bytes are enough."""
    return space // (stage_bytes(tokens, groups) + 16)


def launch_cluster_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    schedule: ClusterSchedule,
) -> bool:
    """Write `x · weightᵀ + residual` to out, on the current stream; summed in float32.

    x: [M, K]; weight: [N, K]; out: [M, N]; residual: [M, N], may be out; `matrices_fit`. The first
    launch of a schedule compiles the kernel: not while a graph is captured. The kernel may start before the one in
    front has ended, which must not write the weight. Returns False, with nothing written and a warning, where the
    machine cannot compile or load it. Raises ValueError where the schedule does not fit.
    """
    residual_at, residual_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    key = (
        *(schedule, x.get_device(), x.dtype, x.shape, len(weight), x.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(residual_at, x.stride(0), weight.stride(0), out.stride(0), residual_stride),
    )
    return _launches.run(key, lambda: _prepare(x, weight, out, residual, schedule))


def _prepare(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
    schedule: ClusterSchedule,
) -> PreparedLaunch | None:
    (rows, inputs), outputs = x.shape, out.shape[1]
    planned = plan(rows, outputs, schedule)
    kernel = _kernel(schedule, planned.x_box, x.dtype, residual is not None, x.get_device())
    if kernel is None:
        return None
    weight_map = mapped(weight, planned.weight_box)
    residual_at, residual_stride = (0, 0) if residual is None else (residual.data_ptr(), residual.stride(0))
    return kernel.prepare(
        *((planned.grid, 1, 1), planned.threads, planned.shared_bytes, planned.cluster, True),
        *(weight_map, mapped(x, planned.x_box), residual_at, out.data_ptr()),
        *(rows, outputs, inputs, residual_stride, out.stride(0)),
    )


@cache
def _kernel(
    schedule: ClusterSchedule, tokens: int, dtype: torch.dtype, residual: bool, index: int
) -> CudaKernel | None:
    """None, with a warning, where there is no compiler, or none whose kernels the driver takes."""
    text, defines = source(schedule, tokens, dtype, residual)
    try:
        return CudaKernel(compile_cuda(text, defines, name=_SOURCE.name), "cluster_linear", index)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"linear layers by clusters are left to cuBLAS: {error}", stacklevel=2)
        return None


def _check(rows: int, tokens: int, schedule: ClusterSchedule) -> None:
    if not 0 < rows <= tokens <= MAX_TOKENS or tokens % 8:
        raise ValueError(f"tokens must be a multiple of 8, from x's {rows} rows to {MAX_TOKENS}, got {tokens}")
    if not 1 <= schedule.groups <= MAX_GROUPS or not has_registers(tokens, schedule.groups):
        raise ValueError(f"groups must be 1 to {MAX_GROUPS} whose sums of {tokens} tokens fit, got {schedule.groups}")
    if not 1 <= schedule.cluster <= MAX_CLUSTER or schedule.launch_at not in (0, 1, 2):
        raise ValueError(f"cluster must be 1 to {MAX_CLUSTER} and launch_at 0 to 2, got {schedule}")
    if schedule.stages < 2 or shared_bytes(tokens, schedule) > SHARED_BYTES:
        raise ValueError(f"stages must be 2 or more that fit {SHARED_BYTES} bytes, got {schedule} for {tokens} tokens")


def _partial_row(schedule: ClusterSchedule) -> int:
    return tile_outputs(schedule) + 4


def _barriers_at(tokens: int, schedule: ClusterSchedule) -> int:
    """Behind the larger of the ring and the sums."""
    ring = schedule.stages * stage_bytes(tokens, schedule.groups)
    return max(ring, 4 * tokens * _partial_row(schedule))
