"""Linear layers with the RMS norm in front, or the residual addition and an RMS norm behind, each as one kernel.

A decoder layer is `normed_linear` (QKV), rotary embedding and attention, `linear_add` (o), `normed_linear_silu_mul`
(gate and up), `linear_add` (down); `delayed_norm` says what they hand on. The kernel is that of `linear` for Hopper;
elsewhere, of other types and of many rows PyTorch's operators give the same.
"""

import torch

from bladellm_kernels.delayed_norm import DelayedNorm, check_norm_weight, delayed_norm
from bladellm_kernels.linear import check_arguments, linear, linear_silu_mul
from bladellm_kernels.linear_schedules import MAX_ROWS, HopperSchedule, ScheduleTable

_table = ScheduleTable()
"""By default the rule for shapes that nobody measured serves them all."""


def use_norms_table(table: ScheduleTable | None) -> None:
    """Take schedules from this table from now on; None for the default."""
    global _table
    _table = table or ScheduleTable()


def norms_schedule(rows: int, weight: torch.Tensor, gated: bool = False) -> HopperSchedule | None:
    """The schedule of these operators for x of `rows` contiguous rows, None where they are several of PyTorch's.

    weight: [N, K], or [2·N, K] where gated. A stack of layers gains by them where all of its weights have a schedule.
    """
    if not weight.is_cuda or not 0 < rows <= MAX_ROWS or not _takes(weight, weight):
        return None
    return _table.choose_with_norms(rows, len(weight) // (1 + gated), weight.shape[1], gated)


def normed_linear(
    norm: DelayedNorm, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`norm(x) · weightᵀ + bias`.

    norm: of [M, K]; weight: [N, K]; bias: [N]; all of one floating-point type and device. out: [M, N] of that type or
    float32. Returns it, or a new tensor of that type. Raises ValueError naming the argument that is wrong.
    """
    check_arguments(norm.weighted, weight, bias, out, None, len(weight), (weight.dtype, torch.float32))
    schedule = norms_schedule(len(norm.weighted), weight)
    if schedule is not None:
        return _launch_product(schedule, norm.weighted, weight, bias, out, 1, norm)
    if out is not None and out.dtype != weight.dtype:
        y = linear(norm.normed().float(), weight.float(), None if bias is None else bias.float())
        return out.copy_(y)
    return linear(norm.normed(), weight, bias, out)


def normed_linear_silu_mul(norm: DelayedNorm, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) · up` of `norm(x) · weightᵀ`.

    norm: of [M, K]; weight: [2·N, K], the gate's rows first; one floating-point type and device. out: [M, N] to write
    to. Returns it, or a new tensor. Raises ValueError naming the argument that is wrong.
    """
    schedule = norms_schedule(len(norm.weighted), weight, gated=True)
    if schedule is None or len(weight) % 2:
        return linear_silu_mul(norm.normed(), weight, out)
    check_arguments(norm.weighted, weight, None, out, None, len(weight) // 2)
    return _launch_product(schedule, norm.weighted, weight, None, out, 2, norm)


def linear_between_norms(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x · weightᵀ + bias` between layers with norms, by their kernel: one of another kind would take the places on the
    multiprocessors that the next layer starts on. A step of 8 rows of two ranks took 3.75 ms so instead of 2.69.

    x: [M, K]; weight: [N, K]; bias: [N]; all of one floating-point type and device. Returns [M, N]. Raises ValueError
    naming the argument that is wrong.
    """
    schedule = norms_schedule(len(x), weight) if _takes(x, weight) else None
    if schedule is None:
        return linear(x, weight, bias)
    check_arguments(x, weight, bias, None, None, len(weight))
    return _launch_product(schedule, x, weight, bias, None, 1)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DelayedNorm]:
    """The residual stream after a layer, `residual + x · weightᵀ + bias`, and its norm by the next layer's weight.

    x: [M, K]; weight: [N, K]; residual: [M, N]; norm_weight: [N]; bias: [N]; all of one floating-point type and device.
    out: [M, N] that the stream is written to, may be residual. Returns the stream, out or a new tensor, and the norm,
    of the stream as it was rounded. Raises ValueError naming the argument that is wrong.
    """
    check_norm_weight(norm_weight, residual)
    schedule = norms_schedule(len(x), weight) if _takes(x, weight) else None
    if schedule is None:
        stream = linear(x, weight, bias, out, residual)
        return stream, delayed_norm(stream, norm_weight, eps)
    check_arguments(x, weight, bias, out, residual, len(weight))
    return _launch_add(schedule, x, weight, residual, norm_weight, eps, bias, out)


def _takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    if not x.is_cuda:
        return False
    from bladellm_kernels.linear_hopper import takes

    return takes(x, weight)


def _launch_product(
    schedule: HopperSchedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    parts: int,
    front: DelayedNorm | None = None,
) -> torch.Tensor:
    """As `LinearCall` has them, without a residual; out may be None for a new tensor."""
    from bladellm_kernels.linear_launch import LinearCall, launch

    if out is None:
        out = weight.new_empty(len(x), len(weight) // parts)
    launch(LinearCall(x, weight, bias, None, out, parts, front=front), schedule)
    return out


def _launch_add(
    schedule: HopperSchedule,
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> tuple[torch.Tensor, DelayedNorm]:
    from bladellm_kernels.linear_launch import LinearCall, NextNorm, launch

    rows, outputs = residual.shape
    stream = torch.empty_like(residual) if out is None else out
    squares = torch.empty(rows, -(-outputs // schedule.block_n), dtype=torch.float32, device=x.device)
    norm = DelayedNorm(residual.new_empty(rows, outputs), squares, eps)
    behind = NextNorm(norm_weight, norm.weighted, squares)
    launch(LinearCall(x, weight, bias, residual, stream, 1, behind=behind), schedule)
    return stream, norm
