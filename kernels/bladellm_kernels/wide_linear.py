"""Linear layers of many rows on a Hopper, SiLU · mul with them: clusters of CTAs that share their rows of x.

Such a layer is bound by arithmetic, at the power that the GPU may take: what does not move leaves more for products.
`wide_linear.cu` is the kernel. Two CTAs beside each other, of the same rows of x and neighbouring outputs, fetch half
of these rows each, and the copy engine writes them to both, which Triton has no words for. The weight is the left
operand of the tensor cores, 64 of its rows to a warpgroup, x the right one. Every cluster takes tile after tile, and
its ring fills on while results are written. It reads the weight ahead while the kernel in front of it ends.

Where the tiles are not whole rounds of the clusters the last two rounds can be divided along the inputs (Stream-K,
https://arxiv.org/abs/2301.03598, in its form of two tiles): then clusters leave sums to each other through the L2
cache. They are added in one order, so that results do not vary.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from bladellm_kernels.cuda_compiler import compile_cuda, compile_side_by_side
from bladellm_kernels.cuda_kernel import CudaKernel, KeptLaunches, PreparedLaunch
from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.hopper_parts import (
    GROUP_ROWS,
    ROW_BYTES,
    SHARED_BYTES,
    STEP_INPUTS,
    has_registers,
    kernel_text,
    mapped,
    threads_of,
)
from bladellm_kernels.linear_schedules import WideSchedule
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.tensor_map import TensorMap, tensor_map

MAX_TOKENS, TOKENS_STEP = 256, 16
"""Rows of x that one tile can have, and what they are a multiple of: two matrices of results, a swizzled half."""
MAX_GROUPS, MAX_CLUSTER = 3, 2
LEAST_STEPS = 4
"""Of 64 inputs of a tile that a cluster takes, at least, where it is divided."""

_MOST_SUMS = max(
    GROUP_ROWS * groups * tokens
    for groups in range(1, MAX_GROUPS + 1)
    for tokens in range(TOKENS_STEP, MAX_TOKENS + 1, TOKENS_STEP)
    if has_registers(tokens, groups)
)
"""Of a CTA."""

_SOURCE = Path(__file__).with_suffix(".cu")
_PARTS = (*(_SOURCE.with_name(name) for name in ("wide_memory.cu", "wide_work.cu", "wide_exchange.cu")), _SOURCE)

_launches = KeptLaunches()


@dataclass(frozen=True, slots=True)
class WidePlan:
    """What a launch needs. grid: CTAs; threads: of a CTA; boxes: rows of a copy, of 64 inputs, and columns of a copy of
    results, of schedule.tokens rows."""

    grid: int
    threads: int
    shared_bytes: int
    weight_box: int
    x_box: int
    out_box: int


def plan(rows: int, outputs: int, inputs: int, schedule: WideSchedule, processors: int) -> WidePlan:
    """The launch of x [rows, inputs] and a weight of so many outputs on so many multiprocessors.

    Raises ValueError saying what does not fit.
    """
    _check(schedule)
    tall, wide = -(-rows // schedule.tokens), -(-outputs // (schedule.cluster * tile_outputs(schedule)))
    shares = tall * wide
    if schedule.stream_k:
        # Twice as many, so that none is left without when they are rounded.
        shares = max(shares * -(-inputs // STEP_INPUTS) // (2 * LEAST_STEPS), 1)
    grid = min(max(processors // schedule.cluster, 1), shares) * schedule.cluster
    boxes = GROUP_ROWS * schedule.groups, schedule.tokens // schedule.cluster, _group_outputs(schedule)
    return WidePlan(grid, threads_of(schedule.groups), shared_bytes(schedule), *boxes)


def source(schedule: WideSchedule, dtype: torch.dtype, residual: bool) -> tuple[str, dict[str, int | str]]:
    """The kernel's text and the macros that it wants."""
    defines: dict[str, int | str] = {
        "TOKENS": schedule.tokens,
        "GROUPS": schedule.groups,
        "STAGES": stages_of(schedule),
        "CLUSTER": schedule.cluster,
        "BAND": schedule.band,
        "HALF": int(dtype == torch.float16),
        "GATED": int(schedule.gated),
        "RESIDUAL": int(residual),
        "STREAM_K": int(schedule.stream_k),
        "LEAST_STEPS": LEAST_STEPS,
        "SHARED_BYTES": shared_bytes(schedule),
    }
    return kernel_text(_PARTS, schedule.tokens, dtype), defines


def stages_of(schedule: WideSchedule) -> int:
    """As many as it says, or as fit beside the results."""
    if schedule.stages is not None:
        return schedule.stages
    return (SHARED_BYTES - _other_bytes(schedule)) // _stage_bytes(schedule)


def shared_bytes(schedule: WideSchedule) -> int:
    """Of a CTA: its ring, two barriers a stage, and what its groups have."""
    return stages_of(schedule) * _stage_bytes(schedule) + _other_bytes(schedule)


def tile_outputs(schedule: WideSchedule) -> int:
    """Of a CTA."""
    return _group_outputs(schedule) * schedule.groups


def prepare_kernels(schedules: Sequence[WideSchedule], weight: torch.Tensor) -> None:
    """Compile side by side, and load, the kernels of schedules for a weight on a Hopper, with a residual and without.
    Weights of the same type have the same ones."""
    if not on_hopper(weight):
        return
    kernels = [(schedule, residual) for schedule in schedules for residual in (False, True)[: 2 - schedule.gated]]
    sources = [source(schedule, weight.dtype, residual) for schedule, residual in kernels]
    compile_side_by_side(sources, _SOURCE.name)
    for schedule, residual in kernels:
        _kernel(schedule, weight.dtype, residual, weight.get_device())


def launch_wide_linear(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, schedule: WideSchedule
) -> bool:
    """Write silu(gate) · up of `x · weightᵀ` to out, on the current stream; or without a gate `x · weightᵀ + residual`.

    x: [M, K]; weight: [2 · N, K], the gate's rows first, or [N, K]; out: [M, N]; residual: [M, N], may be out, none
    with a gate; `matrices_fit`. Summed in float32. The first launch of a schedule compiles the kernel: not while a
    graph is captured. The kernel may start before the one in front has ended, which must not write the weight. Those
    with `stream_k` share memory of the device: they run one after the other. Returns False, with nothing written and a
    warning, where the machine cannot compile or load it. Raises ValueError where the schedule does not fit.
    """
    key = (schedule, x.get_device(), x.dtype, *(_layout(matrix) for matrix in (x, weight, out, residual)))
    return _launches.run(key, lambda: _prepare(x, weight, out, residual, schedule))


def _layout(matrix: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if matrix is None else (matrix.data_ptr(), *matrix.shape, matrix.stride(0))


def _prepare(
    x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, schedule: WideSchedule
) -> PreparedLaunch | None:
    if schedule.gated and residual is not None:
        raise ValueError("with a gate there is no residual")
    (rows, inputs), outputs = x.shape, out.shape[1]
    planned = plan(rows, outputs, inputs, schedule, multiprocessors(x.device))
    kernel = _kernel(schedule, x.dtype, residual is not None, x.get_device())
    if kernel is None:
        return None
    results = [
        mapped(matrix, schedule.tokens, planned.out_box) for matrix in (out if residual is None else residual, out)
    ]
    exchange = [each.data_ptr() for each in _exchange(x.get_device())] if schedule.stream_k else [0, 0]
    return kernel.prepare(
        *((planned.grid, 1, 1), planned.threads, planned.shared_bytes, schedule.cluster, True),
        *((_mapped_halves if schedule.gated else mapped)(weight, planned.weight_box), mapped(x, planned.x_box)),
        *(*results, *exchange, rows, outputs, inputs),
    )


@cache
def _kernel(schedule: WideSchedule, dtype: torch.dtype, residual: bool, index: int) -> CudaKernel | None:
    """None, with a warning, where there is no compiler, or none whose kernels the driver takes."""
    text, defines = source(schedule, dtype, residual)
    try:
        kernel = CudaKernel(compile_cuda(text, defines, name=_SOURCE.name), "wide_linear", index)
        if schedule.stream_k:
            _exchange(index)
        return kernel
    except (OSError, RuntimeError) as error:
        warnings.warn(f"wide linear layers are left to other kernels: {error}", stacklevel=2)
        return None


@cache
def _exchange(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a device, sums that each CTA can leave to another one, and how many of its groups have: none, between
    launches. Never freed, since captured graphs know their addresses."""
    device = torch.device("cuda", index)
    sums = torch.empty(multiprocessors(device), _MOST_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(len(sums), dtype=torch.int32, device=device)


def _mapped_halves(weight: torch.Tensor, box_rows: int) -> TensorMap:
    """As [outputs / 8, halves, 8, inputs]: a box has the same outputs of both halves, 8 by 8."""
    rows, columns = weight.shape
    row = weight.stride(0) * weight.element_size()
    sizes, strides = (columns, 8, 2, rows // 16), (row, rows // 2 * row, 8 * row)
    box = (STEP_INPUTS, 8, 2, box_rows // 16)
    return tensor_map(weight.data_ptr(), weight.dtype, sizes, strides, box, swizzle=ROW_BYTES)


def _check(schedule: WideSchedule) -> None:
    tokens, groups = schedule.tokens, schedule.groups
    if not 0 < tokens <= MAX_TOKENS or tokens % TOKENS_STEP:
        raise ValueError(f"tokens must be a multiple of {TOKENS_STEP} up to {MAX_TOKENS}, got {tokens}")
    if not 1 <= groups <= MAX_GROUPS or not has_registers(tokens, groups):
        raise ValueError(f"groups must be 1 to {MAX_GROUPS} whose sums of {tokens} tokens fit, got {groups}")
    if not 1 <= schedule.cluster <= MAX_CLUSTER or schedule.band < 1:
        raise ValueError(f"cluster must be 1 or {MAX_CLUSTER}, and band at least 1, got {schedule}")
    if stages_of(schedule) < 2 or shared_bytes(schedule) > SHARED_BYTES:
        raise ValueError(f"stages must be 2 or more that fit {SHARED_BYTES} bytes, got {schedule}")


def _group_outputs(schedule: WideSchedule) -> int:
    return GROUP_ROWS // (1 + schedule.gated)


def _stage_bytes(schedule: WideSchedule) -> int:
    """With its barriers."""
    return ROW_BYTES * (GROUP_ROWS * schedule.groups + schedule.tokens) + 16


def _other_bytes(schedule: WideSchedule) -> int:
    """Results, and a barrier for each group's residual."""
    return schedule.groups * (2 * schedule.tokens * _group_outputs(schedule) + 8)
