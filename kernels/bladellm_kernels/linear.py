"""Linear layers of 16-bit weights: kernels of our own where x has few rows, cuBLAS for the others, by an algorithm that
was measured where there is one, but where a gate follows a kernel of our own for many rows, too.

A layer of few rows is bound by reading its weight. The kernels read it at the speed of the memory, start to read it
before the kernel in front of them has ended, and add the layer's residual or apply its gate without a kernel more.
A row's result does not depend on the other rows of x, only on how many there are (that chooses the schedule).
"""

from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F

from bladellm_kernels.cublaslt import multiply
from bladellm_kernels.linear_schedules import (
    MAX_ROWS,
    ClusterSchedule,
    CublasLtSchedule,
    LinearSchedule,
    Schedule,
    ScheduleTable,
    WideSchedule,
    load_table,
    may_apply_gate,
)
from bladellm_kernels.silu_mul import silu_mul

TYPES = (torch.bfloat16, torch.float16)
"""Of the kernels; others go to torch."""

_ALIGNMENT = 16
"""Elements that strides and inputs must be multiples of, and bytes that addresses must be, for 16-byte loads."""

_SCHEDULES = Path(__file__).parent / "schedules"
_RELATIVES = {(9, 0, 132): "nvidia_h100_80gb_hbm3"}
"""Whose table a GPU has that nobody measured, by compute capability and multiprocessors. A table of the same chip is
better than the rule: on an H100 the H200's saves 1 to 2 % of decode steps of 32 to 256 rows, 5 % of 576 rows."""

_given_table: ScheduleTable | None = None


def use_table(table: ScheduleTable | None) -> None:
    """Take schedules from this table from now on; None for the one measured on the device, the default."""
    global _given_table
    _given_table = table


@cache
def measured_table(device: torch.device) -> ScheduleTable:
    """What the benchmarks measured on a GPU of this name, `schedules/linear_*.json`, or on one with the same chip; an
    empty table where there is none."""
    if device.type != "cuda":
        return ScheduleTable()
    chip = torch.cuda.get_device_properties(device)
    names = chip.name.lower().replace(" ", "_"), _RELATIVES.get((chip.major, chip.minor, chip.multi_processor_count))
    paths = (_SCHEDULES / f"linear_{name}.json" for name in names)
    return next((load_table(path) for path in paths if path.exists()), ScheduleTable())


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    measured: int | None = None,
) -> torch.Tensor:
    """`x · weightᵀ + bias + residual`, summed in float32 on CUDA.

    x: [M, K]; weight: [N, K]; bias: [N]; residual: [M, N], may be `out`; all of one floating-point type and device.
    out: [M, N] to write to. measured: outputs of a weight, nearly as many, whose schedule is taken where nobody
    measured this one's; None for no other. Returns out, or a new tensor. Raises ValueError naming the argument that is
    wrong.
    """
    check_arguments(x, weight, bias, out, residual, weight.shape[0])
    schedule = schedule_for(x, weight, outputs=measured)
    if isinstance(schedule, CublasLtSchedule | ClusterSchedule | WideSchedule):
        return _or_by_torch(schedule, x, weight, bias, out, residual)
    if schedule is None:
        return _by_torch(x, weight, bias, out, residual)
    return _launch(schedule, x, weight, bias, out, residual, 1)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) · up` of `x · weightᵀ`, as `silu_mul(linear(x, weight))` but with no rounding in between on CUDA.

    x: [M, K]; weight: [2·N, K], the gate's rows first; one floating-point type and device. out: [M, N] to write to.
    Returns it, or a new tensor. Raises ValueError naming the argument that is wrong.
    """
    if weight.shape[0] % 2:
        raise ValueError(f"weight must have as many rows for the gate as for the other half, got {weight.shape[0]}")
    check_arguments(x, weight, None, out, None, weight.shape[0] // 2)
    schedule = schedule_for(x, weight, gated=True)
    if schedule is not None and not isinstance(schedule, CublasLtSchedule | ClusterSchedule | WideSchedule):
        return _launch(schedule, x, weight, None, out, None, 2)
    if out is None:
        out = x.new_empty(len(x), len(weight) // 2)
    if isinstance(schedule, WideSchedule) and _launched(schedule, x, weight, out, None):
        return out
    if not _by_many_rows(x, weight, out):
        silu_mul(linear(x, weight), out=out)
    return out


def adds_residual(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` adds a residual by the kernel that it takes, of so few rows that cuBLAS is not asked to."""
    return len(x) <= MAX_ROWS and isinstance(schedule_for(x, weight), ClusterSchedule)


def gate_is_part(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear_silu_mul` of so many rows is one kernel, or may be."""
    return may_apply_gate(len(x)) or isinstance(schedule_for(x, weight, gated=True), WideSchedule)


def prepare_linear(weight: torch.Tensor) -> None:
    """Compile and load all kernels in CUDA C++ that `linear` and `linear_silu_mul` may take for many rows of x.

    weight: [N, K], on the current device. Nothing where there are none for it, or no compiler: with a warning then.
    """
    (rows, inputs), table = weight.shape, _given_table or measured_table(weight.device)
    if not weight.is_cuda or weight.dtype not in TYPES or torch.version.hip is not None:
        return
    from bladellm_kernels.wide_linear import prepare_kernels

    plain = table.wide_schedules(rows, inputs, False)
    prepare_kernels([*plain, *table.wide_schedules(rows // 2, inputs, True)], weight)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` in float64. Returns float64."""
    y = x.double() @ weight.double().t()
    y = y if bias is None else y + bias.double()
    return y if residual is None else y + residual.double()


def linear_silu_mul_reference(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`linear_silu_mul` in float64. Returns float64."""
    gate, up = linear_reference(x, weight).chunk(2, dim=1)
    return gate / (1 + torch.exp(-gate)) * up


def schedule_for(
    x: torch.Tensor, weight: torch.Tensor, gated: bool = False, outputs: int | None = None
) -> LinearSchedule | None:
    """The schedule of a kernel, or None where torch computes it: no CUDA, no rows, other types, odd layouts, or where
    the table leaves it to cuBLAS. outputs: as if the weight had so many, where nobody measured its shape."""
    rows, inputs = x.shape
    if not x.is_cuda or rows == 0 or x.dtype not in TYPES or torch.version.hip is not None:
        return None
    if inputs == 0 or len(weight) == 0 or not _fits(x) or not _fits(weight):
        return None
    table = _given_table or measured_table(x.device)
    own = len(weight) // (1 + gated)
    known = outputs is None or (own, inputs, gated) in table.entries
    return table.choose(rows, own if known or outputs is None else outputs, inputs, gated)


def _by_many_rows(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> bool:
    """Write silu(gate) · up to out by the kernel of many rows, where that is faster and it can. Whether it did."""
    if not x.is_cuda or not may_apply_gate(len(x)):
        return False
    from bladellm_kernels.many_rows_linear import gate_columns, launch_many_rows, many_rows_fits

    columns = gate_columns(len(x), out.shape[1], x.device)
    if columns is None or not many_rows_fits(x, weight, out):
        return False
    launch_many_rows(x, weight, out, 2, columns)
    return True


def _fits(matrix: torch.Tensor) -> bool:
    """Whether every 16 elements of a row begin at an address of 16-byte loads."""
    rows, columns = matrix.shape
    aligned = columns % _ALIGNMENT == 0 and (rows == 1 or matrix.stride(0) % _ALIGNMENT == 0)
    return aligned and matrix.stride(1) == 1 and matrix.data_ptr() % _ALIGNMENT == 0


def _launch(
    schedule: Schedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
    parts: int,
) -> torch.Tensor:
    from bladellm_kernels.linear_launch import LinearCall, launch

    if out is None:
        out = x.new_empty(len(x), len(weight) // parts)
    launch(LinearCall(x, weight, bias, residual, out, parts), schedule)
    return out


def _or_by_torch(
    schedule: CublasLtSchedule | ClusterSchedule | WideSchedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    """By the algorithm of cuBLASLt or in CUDA C++, or by the algorithm that cuBLAS chooses where these do not fit."""
    result = x.new_empty(len(x), len(weight)) if out is None else out
    if isinstance(schedule, CublasLtSchedule):
        done = multiply(schedule, x, weight, bias, residual, result)
    else:
        done = bias is None and _launched(schedule, x, weight, result, residual)
    return result if done else _by_torch(x, weight, bias, result, residual)


def _launched(
    schedule: ClusterSchedule | WideSchedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    residual: torch.Tensor | None,
) -> bool:
    """Whether the kernel can read and write them, on this machine; launched then."""
    from bladellm_kernels.cluster_linear import launch_cluster_linear
    from bladellm_kernels.hopper_parts import matrices_fit
    from bladellm_kernels.wide_linear import launch_wide_linear

    if not matrices_fit(x, weight, out, residual):
        return False
    if isinstance(schedule, WideSchedule):
        return launch_wide_linear(x, weight, out, residual, schedule)
    return launch_cluster_linear(x, weight, out, residual, schedule)


def _by_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
) -> torch.Tensor:
    if out is not None and residual is None:
        turned = weight.t()
        return torch.mm(x, turned, out=out) if bias is None else torch.addmm(bias, x, turned, out=out)
    if residual is not None and bias is None:
        # cuBLAS adds in float32 and rounds once; in place where out is the residual.
        return torch.addmm(residual, x, weight.t(), out=out)
    y = F.linear(x, weight, bias)
    y = y if residual is None else y.add_(residual)
    return y if out is None else out.copy_(y)


def check_arguments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    residual: torch.Tensor | None,
    outputs: int,
    out_types: tuple[torch.dtype, ...] = (),
) -> None:
    """As `linear` says, of so many outputs; out may have other types than x's. ValueError names the wrong argument."""
    if weight.ndim != 2 or x.ndim != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [M, K] and weight [N, K], got {list(x.shape)} and {list(weight.shape)}")
    shapes = {"weight": weight.shape, "bias": weight.shape[:1], "out": (len(x), outputs), "residual": (len(x), outputs)}
    for name, tensor in (("weight", weight), ("bias", bias), ("out", out), ("residual", residual)):
        if tensor is None:
            continue
        if tensor.shape != shapes[name]:
            raise ValueError(f"{name} must be {list(shapes[name])}, got {list(tensor.shape)}")
        typed = tensor.dtype == x.dtype or (name == "out" and tensor.dtype in out_types)
        if not typed or tensor.device != x.device:
            raise ValueError(f"{name} must be {x.dtype} on {x.device} like x, got {tensor.dtype} on {tensor.device}")
        if name != "weight" and tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}")
