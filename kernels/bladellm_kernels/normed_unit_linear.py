"""Linear layers of a `UnitWeight` with the operators around them, each as one kernel; see `normed_linear`."""

import torch

from bladellm_kernels import warp_units
from bladellm_kernels.delayed_norm import DelayedNorm, check_norm_weight
from bladellm_kernels.hopper_device import is_other_gpu
from bladellm_kernels.linear_launch import NextNorm
from bladellm_kernels.unit_call import UnitCall
from bladellm_kernels.unit_launch import launch_units, norm_parts
from bladellm_kernels.unit_schedules import NORM_SCHEDULES, NormSchedule, WarpRings, norm_schedule
from bladellm_kernels.weight_units import UnitWeight


def unit_norm_schedule(tokens: int, weight: UnitWeight, gated: bool = False) -> NormSchedule | None:
    """The schedule of these operators for x of `tokens` rows, None where they are several operators."""
    if tokens == 0:
        return None
    rings, warps = not is_other_gpu(weight.codes.device), warp_units.takes(weight)
    return norm_schedule(tokens, weight.rows, weight.columns, gated, rings, warps)


def takes_whole_sms(tokens: int, weight: UnitWeight) -> bool:
    """Whether a program of these operators fills a multiprocessor."""
    return isinstance(unit_norm_schedule(tokens, weight), WarpRings)


def normed_unit_linear(
    norm: DelayedNorm,
    weight: UnitWeight,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    schedule: NormSchedule | None = None,
) -> torch.Tensor:
    """`norm(x) · weightᵀ + bias` [T, N], gated: `silu(first half) · second half` of it, [T, N / 2].

    norm: of [T, columns] in bfloat16 or float16; bias: [rows] of that type. Raises ValueError where there is no
    schedule for so many tokens.
    """
    x = norm.weighted
    out = x.new_empty(len(x), weight.rows // (1 + gated))
    call = UnitCall(x, weight, out, bias, parts=1 + gated, front=norm)
    launch_units(call, schedule or _schedule(len(x), weight, gated))
    return out


def unit_linear_add(
    x: torch.Tensor,
    weight: UnitWeight,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    *,
    schedule: NormSchedule | None = None,
) -> DelayedNorm:
    """Add `x · weightᵀ + bias` to the residual stream [T, N] in place; its norm by the next layer's weight.

    x: [T, columns]; norm_weight: [N]; bias: [N]; all of one type, bfloat16 or float16. The norm is of the stream as it
    was rounded. Raises ValueError naming the argument that is wrong, or where there is no schedule.
    """
    check_norm_weight(norm_weight, residual)
    if residual.shape != (len(x), weight.rows) or residual.dtype != x.dtype or residual.stride(1) != 1:
        raise ValueError(f"residual must be {x.dtype} [{len(x)}, {weight.rows}], got {list(residual.shape)}")
    chosen = schedule or _schedule(len(x), weight, False)
    parts = norm_parts(len(x), weight, chosen, x.device)
    squares = torch.empty(len(x), parts, dtype=torch.float32, device=x.device)
    norm = DelayedNorm(torch.empty(residual.shape, dtype=x.dtype, device=x.device), squares, eps)
    behind = NextNorm(norm_weight, norm.weighted, squares)
    launch_units(UnitCall(x, weight, residual, bias, residual, behind=behind), chosen)
    return norm


def _schedule(tokens: int, weight: UnitWeight, gated: bool) -> NormSchedule:
    chosen = unit_norm_schedule(tokens, weight, gated)
    if chosen is None:
        most = max(NORM_SCHEDULES)
        raise ValueError(f"layers with norms take up to {most} tokens and whole tiles of gates, got {tokens}")
    return chosen
