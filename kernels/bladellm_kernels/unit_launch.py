"""Launches the kernels of a `UnitWeight` that have a residual, gates and norms: `Gemv`, `Streamed` and `Ring`."""

import torch
import triton

from bladellm_kernels import warp_units
from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.gemv_units_gluon import gemv_units_kernel
from bladellm_kernels.linear_launch import norm_arguments
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.ring_launch import launch_ring
from bladellm_kernels.stream_sums_gluon import StreamTile
from bladellm_kernels.stream_units_gluon import stream_units_kernel
from bladellm_kernels.unit_call import UnitCall
from bladellm_kernels.unit_schedules import (
    Gemv,
    NormSchedule,
    Ring,
    Streamed,
    WarpRings,
    round_share,
    stream_programs,
    stream_turns,
)
from bladellm_kernels.weight_units import TOKEN_TILES, UnitWeight


def launch_units(call: UnitCall, schedule: NormSchedule) -> None:
    """One kernel on the current stream. ValueError where it is not for so many tokens, or has no gate."""
    if isinstance(schedule, Gemv):
        launch_gemv(call, schedule)
    elif isinstance(schedule, Streamed):
        launch_streamed(call, schedule)
    elif isinstance(schedule, WarpRings):
        warp_units.launch(call, schedule)
    else:
        launch_ring(call, schedule)


def norm_parts(tokens: int, weight: UnitWeight, schedule: NormSchedule, device: torch.device) -> int:
    """Partial sums of squares that a launch leaves of each token, given a norm behind its outputs."""
    if isinstance(schedule, Streamed):
        return _stream_programs(tokens, weight.rows, weight.steps, schedule, device)
    if isinstance(schedule, WarpRings):
        return warp_units.square_parts(tokens, weight, schedule, multiprocessors(device))
    return -(-weight.rows // (schedule.outputs if isinstance(schedule, Ring) else schedule.rows))


def launch_gemv(call: UnitCall, schedule: Gemv) -> None:
    if call.tokens > schedule.tokens or call.parts > 1:
        raise ValueError(f"{schedule} is for up to {schedule.tokens} tokens and one part, got {call.tokens}")
    weight, device = call.weight, call.x.device
    tiles = triton.cdiv(weight.rows, schedule.rows)
    share = round_share(schedule, tiles, weight.steps, multiprocessors(device))
    splits = triton.cdiv(weight.steps, share)
    room = tiles * splits * schedule.rows * schedule.tokens if splits > 1 else 0
    gemv_units_kernel[(tiles, splits)](
        call.x, call.pairs, call.bias, call.residual, call.out, *norm_arguments(call),
        call.x.new_empty(room, dtype=torch.float32), weight.arrived, *call.strides, call.tokens, weight.rows,
        weight.columns, splits, share, SHAPE=call.shape(schedule.round), ROWS=schedule.rows, TOKENS=schedule.tokens,
        WARPS=schedule.warps, ROW_WARPS=schedule.row_warps, STEPS=schedule.steps, ONE_ROUND=share <= schedule.round,
        SPLIT=splits > 1, SQUARES=call.squares, num_warps=schedule.warps * schedule.row_warps,
        maxnreg=schedule.registers, **early_launch(device),
    )  # fmt: skip


def launch_streamed(call: UnitCall, schedule: Streamed) -> None:
    weight, device = call.weight, call.x.device
    token_tiles = triton.cdiv(call.tokens, schedule.tokens)
    if token_tiles > (TOKEN_TILES if call.alone else 1):
        raise ValueError(f"{schedule} is for fewer tokens, got {call.tokens}")
    if call.parts > 1 and call.outputs % schedule.rows:
        raise ValueError(f"parts must be whole tiles of {schedule.rows} outputs, got {call.outputs}")
    tiles, splits = triton.cdiv(call.outputs, schedule.rows), triton.cdiv(weight.steps, schedule.round)
    programs = _stream_programs(call.tokens, call.outputs, weight.steps, schedule, device)
    room = token_tiles * tiles * call.parts * splits * schedule.rows * schedule.tokens if splits > 1 else 0
    tile = StreamTile(
        schedule.rows, schedule.tokens, schedule.warps, schedule.steps, schedule.depth, call.parts, splits,
        stream_turns(schedule, tiles, programs) if splits > 1 else 1, call.squares,
        weight.bits == 4 and call.x.dtype != torch.float16 and schedule.raw,
    )  # fmt: skip
    stream_units_kernel[(programs, splits, token_tiles)](
        call.x, call.pairs, call.bias, call.residual, call.out, *norm_arguments(call),
        call.x.new_empty(room, dtype=torch.float32), weight.arrived, *call.strides, call.tokens, call.outputs,
        weight.columns, tiles, SHAPE=call.shape(schedule.round), TILE=tile, num_warps=schedule.warps,
        maxnreg=65536 // (32 * schedule.warps * schedule.programs_per_sm), **early_launch(device),
    )  # fmt: skip


def _stream_programs(tokens: int, outputs: int, steps: int, schedule: Streamed, device: torch.device) -> int:
    tiles, splits = triton.cdiv(outputs, schedule.rows), triton.cdiv(steps, schedule.round)
    return stream_programs(schedule, tiles, splits, triton.cdiv(tokens, schedule.tokens), multiprocessors(device))
