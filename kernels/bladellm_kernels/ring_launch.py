"""Launches `ring_units_kernel`: descriptors for the copy engine, and memory in which programs meet."""

import torch
import torch.nn.functional as F
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.linear_hopper import described
from bladellm_kernels.linear_launch import most_segments, norm_arguments
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.ring_factors_hopper import UnitTile
from bladellm_kernels.ring_units_hopper import ring_units_kernel
from bladellm_kernels.unit_call import UnitCall
from bladellm_kernels.unit_schedules import Ring, ring_programs
from bladellm_kernels.weight_units import STEP_UNITS, TILE_ROWS, UnitWeight


def launch_ring(call: UnitCall, schedule: Ring) -> None:
    """On a Hopper; ValueError where x has too many rows for the weight's counters or a residual or norm, or parts are
    no whole tiles of the weight."""
    weight, device, shape = call.weight, call.x.device, call.shape(1)
    tile = UnitTile(
        schedule.tokens, schedule.outputs, schedule.steps * shape.step, schedule.stages, schedule.wide, schedule.deep,
        call.parts, schedule.steps, call.squares, schedule.ahead or schedule.stages,
    )  # fmt: skip
    blocks, token_tiles = triton.cdiv(call.outputs, tile.wide * tile.outputs), triton.cdiv(call.tokens, tile.rows)
    if blocks * tile.wide * token_tiles > len(weight.arrived) or (token_tiles > 1 and not call.alone):
        raise ValueError(f"{schedule} is for fewer tokens, got {call.tokens}")
    if schedule.stages % schedule.deep:
        # A stage whose tiles another group has read may be a phase behind the one that is waited for.
        raise ValueError(f"stages must be a multiple of deep, got {schedule}")
    if call.parts > 1 and call.outputs % TILE_ROWS:
        raise ValueError(f"parts must be whole tiles of {TILE_ROWS} outputs, got {call.outputs}")
    length = triton.cdiv(weight.steps, schedule.steps)
    total = blocks * length
    programs = ring_programs(schedule, blocks, length, max(1, multiprocessors(device) // token_tiles))
    room = 2 * programs * token_tiles * tile.wide * tile.parts * tile.outputs * tile.rows if programs != blocks else 0
    ring_units_kernel[(programs, token_tiles)](
        described(_readable(call.x), tile.rows, tile.inputs), _described_units(weight, tile), call.arguments, call.bias,
        call.residual, call.out, *norm_arguments(call), call.x.new_empty(room, dtype=torch.float32), weight.arrived,
        call.tokens, call.outputs, weight.columns, *call.strides[2:], SHAPE=shape, TILE=tile,
        SEGMENTS=most_segments(length, total, programs), FOLD=schedule.fold, num_warps=tile.warps,
        **early_launch(device),
    )  # fmt: skip


def units_by_part(weight: UnitWeight, parts: int) -> torch.Tensor:
    """The codes, [parts, tiles of a part, steps · 64, 32]."""
    return weight.codes.view(parts, -1, weight.steps * TILE_ROWS, STEP_UNITS)


def _described_units(weight: UnitWeight, tile: UnitTile) -> TensorDescriptor:
    """The same as the copy engine reads them."""
    codes = units_by_part(weight, tile.parts)
    box = [tile.parts, tile.outputs // TILE_ROWS, tile.steps * TILE_ROWS, STEP_UNITS]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int16)
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), box, layout)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x or, where the copy engine cannot read its rows, which must be at whole 16 bytes, the same numbers elsewhere."""
    aligned = x.data_ptr() % 16 == 0 and (len(x) == 1 or x.stride(0) % 8 == 0)
    if aligned and x.stride(1) == 1:
        return x
    columns = x.shape[1]
    return F.pad(x, (0, -columns % 8))[:, :columns]
