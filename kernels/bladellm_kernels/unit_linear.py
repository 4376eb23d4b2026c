"""The linear layer of a `UnitWeight` on CUDA: the kernel and its schedule by the number of tokens."""

import torch
import torch.nn.functional as F
import triton

from bladellm_kernels.dequantize_units_triton import dequantize_units_kernel
from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.gemv_units_gluon import gemv_units_kernel
from bladellm_kernels.many_tokens_triton import many_tokens_kernel
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.ring_launch import launch_ring
from bladellm_kernels.row_blocks import block_slices
from bladellm_kernels.stream_units_gluon import stream_units_kernel
from bladellm_kernels.unit_schedules import (
    Dense,
    Gemv,
    ManyTokens,
    Ring,
    Schedule,
    Streamed,
    round_share,
    split_count,
    stream_programs,
    stream_turns,
    unit_schedule,
)
from bladellm_kernels.weight_units import TILE_ROWS, TOKEN_TILES, UnitWeight
from bladellm_kernels.weight_units_triton import UnitShape, WeightArguments


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
    y = x.new_empty(len(x), weight.rows) if out is None else out
    if y.shape != (len(x), weight.rows) or y.dtype != x.dtype or y.stride(1) != 1:
        raise ValueError(f"out must be {x.dtype} [{len(x)}, {weight.rows}], rows contiguous, got {y.dtype} {y.shape}")
    if not len(x):
        return y
    chosen = schedule or unit_schedule(len(x), weight.rows, weight.columns)
    if isinstance(chosen, Gemv):
        _gemv(x, weight, bias, y, chosen)
    elif isinstance(chosen, Streamed):
        _streamed(x, weight, bias, y, chosen)
    elif isinstance(chosen, ManyTokens):
        _many_tokens(x, weight, bias, y, chosen)
    elif isinstance(chosen, Ring):
        launch_ring(x, weight, _arguments(weight), _shape(weight, 1, x), bias, y, chosen)
    else:
        _dense(x, weight, bias, y, chosen)
    return y


def dequantize_units(weight: UnitWeight, out: torch.Tensor, first_row: int = 0) -> None:
    """Write rows of the weight from `first_row`, a multiple of 64, into out, [R, columns] of a floating point type,
    contiguous."""
    grid = (triton.cdiv(len(out), TILE_ROWS), weight.steps)
    shape = _shape(weight, 1, out)
    dequantize_units_kernel[grid](
        _arguments(weight), out, first_row // TILE_ROWS, len(out), weight.columns, SHAPE=shape, num_warps=4,
        **early_launch(out.device),
    )  # fmt: skip


def _gemv(x: torch.Tensor, weight: UnitWeight, bias: torch.Tensor | None, y: torch.Tensor, schedule: Gemv) -> None:
    if len(x) > schedule.tokens:
        raise ValueError(f"{schedule} is for up to {schedule.tokens} tokens, got {len(x)}")
    tiles = triton.cdiv(weight.rows, schedule.rows)
    share = round_share(schedule, tiles, weight.steps, multiprocessors(x.device))
    splits = triton.cdiv(weight.steps, share)
    room = tiles * splits * schedule.rows * schedule.tokens if splits > 1 else 0
    gemv_units_kernel[(tiles, splits)](
        x, _arguments(weight)._replace(codes=weight.codes.view(torch.int32)), y if bias is None else bias, y,
        x.new_empty(room, dtype=torch.float32), weight.arrived, x.stride(0), x.stride(1), y.stride(0), len(x),
        weight.rows, weight.columns, splits, share, SHAPE=_shape(weight, schedule.round, x), ROWS=schedule.rows,
        TOKENS=schedule.tokens, WARPS=schedule.warps, ROW_WARPS=schedule.row_warps, STEPS=schedule.steps,
        ONE_ROUND=share <= schedule.round, SPLIT=splits > 1, HAS_BIAS=bias is not None,
        num_warps=schedule.warps * schedule.row_warps, maxnreg=schedule.registers, **early_launch(x.device),
    )  # fmt: skip


def _streamed(
    x: torch.Tensor, weight: UnitWeight, bias: torch.Tensor | None, y: torch.Tensor, schedule: Streamed
) -> None:
    tiles, splits = triton.cdiv(weight.rows, schedule.rows), triton.cdiv(weight.steps, schedule.round)
    token_tiles = triton.cdiv(len(x), schedule.tokens)
    if token_tiles > TOKEN_TILES:
        raise ValueError(f"{schedule} is for up to {TOKEN_TILES} times its tokens, got {len(x)}")
    programs = stream_programs(schedule, tiles, splits, token_tiles, multiprocessors(x.device))
    room = token_tiles * tiles * splits * schedule.rows * schedule.tokens if splits > 1 else 0
    stream_units_kernel[(programs, splits, token_tiles)](
        x, _arguments(weight)._replace(codes=weight.codes.view(torch.int32)), y if bias is None else bias, y,
        x.new_empty(room, dtype=torch.float32), weight.arrived, x.stride(0), x.stride(1), y.stride(0), len(x),
        weight.rows, weight.columns, tiles, SHAPE=_shape(weight, schedule.round, x), ROWS=schedule.rows,
        TOKENS=schedule.tokens, WARPS=schedule.warps, STEPS=schedule.steps, DEPTH=schedule.depth, SPLITS=splits,
        TURNS=stream_turns(schedule, tiles, programs) if splits > 1 else 1,
        RAW=weight.bits == 4 and x.dtype != torch.float16 and schedule.raw, HAS_BIAS=bias is not None,
        num_warps=schedule.warps,
        maxnreg=65536 // (32 * schedule.warps * schedule.programs_per_sm), **early_launch(x.device),
    )  # fmt: skip


def _many_tokens(
    x: torch.Tensor, weight: UnitWeight, bias: torch.Tensor | None, y: torch.Tensor, schedule: ManyTokens
) -> None:
    row_tiles, token_tiles = triton.cdiv(weight.rows, schedule.rows), triton.cdiv(len(x), schedule.tokens)
    splits = 1
    if token_tiles <= TOKEN_TILES:
        splits = split_count(schedule, row_tiles * token_tiles, weight.steps, multiprocessors(x.device))
    room = token_tiles * row_tiles * splits * schedule.rows * schedule.tokens if splits > 1 else 0
    many_tokens_kernel[(row_tiles * splits, token_tiles)](
        x, _arguments(weight), y if bias is None else bias, y, x.new_empty(room, dtype=torch.float32), weight.arrived,
        x.stride(0), x.stride(1), y.stride(0), len(x), weight.rows, weight.columns, splits,
        SHAPE=_shape(weight, 1, x), ROWS=schedule.rows, TOKENS=schedule.tokens, SPLIT=splits > 1, FOLD=schedule.fold,
        STAGES=schedule.stages, PREFETCH=schedule.prefetch, HAS_BIAS=bias is not None,
        num_warps=schedule.warps, **early_launch(x.device),
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


def _arguments(weight: UnitWeight) -> WeightArguments:
    # What is not there is not read.
    zeros = weight.codes if weight.zeros is None else weight.zeros
    tiles, steps = weight.codes.shape[:2]
    return WeightArguments(weight.codes, weight.scales, zeros, tiles, steps, weight.scales.shape[1])


def _shape(weight: UnitWeight, warps: int, x: torch.Tensor) -> UnitShape:
    even = weight.columns % weight.step == 0 and weight.steps % warps == 0
    return UnitShape(weight.bits, weight.group_steps, weight.zeros is not None, even, plain=not x.is_cuda)
