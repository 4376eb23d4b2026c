"""The linear layer of a `UnitWeight` on CUDA: the kernel and its schedule by the number of tokens."""

import torch
import torch.nn.functional as F
import triton

from bladellm_kernels.dequantize_units_triton import dequantize_units_kernel
from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.hopper_device import is_other_gpu
from bladellm_kernels.many_tokens_triton import many_tokens_kernel
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.row_blocks import block_slices
from bladellm_kernels.silu_mul import silu_mul
from bladellm_kernels.unit_call import UnitCall, unit_arguments, unit_shape
from bladellm_kernels.unit_launch import launch_units
from bladellm_kernels.unit_schedules import (
    Dense,
    ManyTokens,
    Ring,
    Schedule,
    gated_schedule,
    split_count,
    unit_schedule,
)
from bladellm_kernels.weight_units import TILE_ROWS, TOKEN_TILES, UnitWeight


def unit_linear(
    x: torch.Tensor,
    weight: UnitWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    schedule: Schedule | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, products of exact codes summed in float32; `Dense` rounds the weight to x's type.

    x: bfloat16 or float16 [T, columns], any strides. bias: [rows] of x's type. out: [T, rows] of x's type, rows
    contiguous. Returns out, or a new tensor.
    """
    y = _outputs(x, weight.rows, out)
    if not len(x):
        return y
    chosen = schedule or unit_schedule(
        len(x), weight.rows, weight.columns, fine=weight.group_steps < 0, rings=not is_other_gpu(x.device)
    )
    call = UnitCall(x, weight, y, bias)
    if isinstance(chosen, ManyTokens):
        _many_tokens(call, chosen)
    elif isinstance(chosen, Dense):
        _dense(x, weight, bias, y, chosen)
    else:
        launch_units(call, chosen)
    return y


def unit_linear_silu_mul(
    x: torch.Tensor,
    weight: UnitWeight,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    schedule: Ring | None = None,
) -> torch.Tensor:
    """`silu(gate) · up` of `unit_linear`, [T, rows / 2], the gate's outputs first; unrounded before the gate where one
    kernel computes it.

    out: [T, rows / 2] of x's type, rows contiguous. Returns it, or a new tensor.
    """
    chosen = schedule or gated_schedule(len(x), weight.rows, weight.group_steps < 0, not is_other_gpu(x.device))
    if chosen is None:
        return silu_mul(unit_linear(x, weight, bias), out=out)
    y = _outputs(x, weight.rows // 2, out)
    launch_units(UnitCall(x, weight, y, bias, parts=2), chosen)
    return y


def _outputs(x: torch.Tensor, outputs: int, out: torch.Tensor | None) -> torch.Tensor:
    """[T, outputs] of x's type to write to: `out`, or new. ValueError where out is none."""
    y = x.new_empty(len(x), outputs) if out is None else out
    if y.shape != (len(x), outputs) or y.dtype != x.dtype or y.stride(1) != 1:
        raise ValueError(f"out must be {x.dtype} [{len(x)}, {outputs}], rows contiguous, got {y.dtype} {list(y.shape)}")
    return y


def dequantize_units(weight: UnitWeight, out: torch.Tensor, first_row: int = 0) -> None:
    """Write rows of the weight from `first_row`, a multiple of 64, into out, [R, columns] of a floating point type,
    contiguous."""
    grid = (triton.cdiv(len(out), TILE_ROWS), weight.steps)
    shape = unit_shape(weight, 1, out)
    dequantize_units_kernel[grid](
        unit_arguments(weight), out, first_row // TILE_ROWS, len(out), weight.columns, SHAPE=shape, num_warps=4,
        **early_launch(out.device),
    )  # fmt: skip


def _many_tokens(call: UnitCall, schedule: ManyTokens) -> None:
    x, weight = call.x, call.weight
    row_tiles, token_tiles = triton.cdiv(weight.rows, schedule.rows), triton.cdiv(len(x), schedule.tokens)
    splits = 1
    if token_tiles <= TOKEN_TILES:
        splits = split_count(schedule, row_tiles * token_tiles, weight.steps, multiprocessors(x.device))
    room = token_tiles * row_tiles * splits * schedule.rows * schedule.tokens if splits > 1 else 0
    many_tokens_kernel[(row_tiles * splits, token_tiles)](
        x, call.arguments, call.out if call.bias is None else call.bias, call.out,
        x.new_empty(room, dtype=torch.float32), weight.arrived, x.stride(0), x.stride(1), call.out.stride(0), len(x),
        weight.rows, weight.columns, splits, SHAPE=call.shape(1), ROWS=schedule.rows, TOKENS=schedule.tokens,
        SPLIT=splits > 1, STAGES=schedule.stages, PREFETCH=schedule.prefetch,
        HAS_BIAS=call.bias is not None, num_warps=schedule.warps, **early_launch(x.device),
    )  # fmt: skip


def _dense(x: torch.Tensor, weight: UnitWeight, bias: torch.Tensor | None, y: torch.Tensor, schedule: Dense) -> None:
    workspace = x.new_empty(min(weight.rows, schedule.rows), weight.columns)
    for part in block_slices(weight.rows, 1, schedule.rows):
        values = workspace[: part.stop - part.start]
        dequantize_units(weight, values, part.start)
        if len(values) == weight.rows and bias is None:
            torch.mm(x, values.t(), out=y)
        else:
            y[:, part] = F.linear(x, values, None if bias is None else bias[part])
