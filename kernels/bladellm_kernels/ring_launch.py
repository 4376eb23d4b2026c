"""Launches `ring_units_kernel`: descriptors for the copy engine, and memory in which programs meet."""

import torch
import torch.nn.functional as F
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.linear_hopper import described
from bladellm_kernels.linear_launch import most_segments
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.ring_factors_hopper import UnitTile
from bladellm_kernels.ring_units_hopper import ring_units_kernel
from bladellm_kernels.unit_schedules import Ring
from bladellm_kernels.weight_units import STEP_UNITS, TILE_ROWS, UnitWeight
from bladellm_kernels.weight_units_triton import UnitShape, WeightArguments


def launch_ring(
    x: torch.Tensor,
    weight: UnitWeight,
    arguments: WeightArguments,
    shape: UnitShape,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    schedule: Ring,
) -> None:
    """y = x · weightᵀ + bias on a Hopper; ValueError where x has too many rows for the weight's counters."""
    tile = UnitTile(
        schedule.tokens, schedule.outputs, schedule.steps * shape.step, schedule.stages, schedule.warps, 1,
        schedule.late, schedule.steps,
    )  # fmt: skip
    blocks, token_tiles = triton.cdiv(weight.rows, tile.outputs), triton.cdiv(len(x), tile.rows)
    if blocks * token_tiles > len(weight.arrived):
        raise ValueError(f"{schedule} is for fewer tokens, got {len(x)}")
    length = triton.cdiv(weight.steps, schedule.steps)
    total = blocks * length
    programs = min(max(1, multiprocessors(x.device) * schedule.programs_per_sm // token_tiles), total)
    room = 2 * programs * token_tiles * tile.outputs * tile.rows if programs != blocks else 0
    ring_units_kernel[(programs, token_tiles)](
        described(_readable(x), tile.rows, tile.inputs), _described_units(weight, tile), arguments, bias, y,
        x.new_empty(room, dtype=torch.float32), weight.arrived, len(x), weight.rows, y.stride(0),
        SHAPE=shape, TILE=tile, SEGMENTS=most_segments(length, total, programs), FOLD=schedule.fold,
        num_warps=schedule.warps, **early_launch(x.device),
    )  # fmt: skip


def _described_units(weight: UnitWeight, tile: UnitTile) -> TensorDescriptor:
    """The codes as the copy engine reads them, [tiles, steps · 64, 32]."""
    codes = weight.codes.view(len(weight.codes), -1, STEP_UNITS)
    box = [tile.outputs // TILE_ROWS, tile.steps * TILE_ROWS, STEP_UNITS]
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.int16)
    return TensorDescriptor(codes, list(codes.shape), list(codes.stride()), box, layout)


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x or, where the copy engine cannot read its rows, which must be at whole 16 bytes, the same numbers elsewhere."""
    aligned = x.data_ptr() % 16 == 0 and (x.stride(0) if len(x) > 1 else x.shape[1]) % 8 == 0
    if aligned and x.stride(1) == 1:
        return x
    columns = x.shape[1]
    return F.pad(x, (0, -columns % 8))[:, :columns]
