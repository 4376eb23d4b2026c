"""Integer weights as CUDA kernels read them: tiles of 64 output channels, in the order of a kernel's steps through K.

A unit is 16 bits: four codes of 4 bits or two of 8 bits, its parts. Unit i of step t holds, as part s, the code of
input `t · 32 · parts + 32 · s + i`. So a step's units are one contiguous block of 4 KiB, a part of 32 units multiplies
32 consecutive inputs, and numbers need no rearranging between memory and tensor cores.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bladellm_kernels.linear_checks import is_hopper

TILE_ROWS = 64
STEP_UNITS = 32
_ROWS_MULTIPLE = 128
"""Outputs that there are codes for: kernels read whole tiles, or the last one again."""

_SCALES_MULTIPLE = 256
"""The largest tile of outputs a program computes: of one group it reads the scales of all of them."""

TOKEN_TILES = 4
"""Most tiles of tokens whose sums may be split among programs."""

_PACK_ELEMENTS = 1 << 26
"""Codes packed at a time: a bound on the workspace."""


@dataclass(frozen=True, slots=True)
class UnitWeight:
    """A weight `scales · (codes − zeros)`, [rows, columns], filled up to pairs of tiles and whole steps.

    codes: int16 [tiles, steps, 64, 32]. scales: floating point [tiles, groups, 64]; of one group there may be two tiles
    more of them than of codes. zeros: uint8 like scales, None for 8 (of 8 bits: 128). group_steps: steps a group is
    long; 0 where there is one group, and a negative number says how many groups are in one step. arrived: int32
    [tiles · 4], zeros between two products, which therefore must not run at the same time on two streams.
    """

    rows: int
    columns: int
    bits: int
    group_steps: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    arrived: torch.Tensor

    @property
    def step(self) -> int:
        """Inputs of a step."""
        return STEP_UNITS * (16 // self.bits)

    @property
    def steps(self) -> int:
        return self.codes.shape[1]


def runs_on_units(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, bits: int) -> bool:
    """Whether `unit_linear` multiplies activations of `dtype` by such a weight: sm_90 on, 16 bits, groups that fit."""
    fits = unit_group_size(codes.shape[1], scales.shape[1], bits) is not None
    return fits and dtype in (torch.bfloat16, torch.float16) and is_hopper(codes.device)


def unit_group_size(columns: int, groups: int, bits: int) -> int | None:
    """Inputs that share a scale in this layout, `columns` for one group, None where groups do not fit it."""
    size, step = columns // groups, STEP_UNITS * (16 // bits)
    if groups == 1 or size % step == 0:
        return size
    return next((part for part in (step // 2, step // 4) if part >= STEP_UNITS and size % part == 0), None)


def pack_units(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int) -> UnitWeight:
    """codes: uint8 [N, K]; scales: floating point [N, G]; zeros: uint8 [N, G] or None; `unit_group_size` must not be
    None, and zeros must be None with 8 bits."""
    rows, columns = codes.shape
    size = unit_group_size(columns, scales.shape[1], bits)
    if size is None or (bits == 8 and zeros is not None):
        raise ValueError(f"{scales.shape[1]} groups of {columns} codes of {bits} bits do not fit this layout")
    step = STEP_UNITS * (16 // bits)
    steps = -(-columns // step)
    repeats = columns // scales.shape[1] // size
    groups = 1 if scales.shape[1] == 1 else -(-steps * step // size)
    blocks = codes.split(max(1, _PACK_ELEMENTS // columns // _ROWS_MULTIPLE) * _ROWS_MULTIPLE)
    packed = torch.cat([_pack_block(block, steps, bits) for block in blocks])
    return UnitWeight(
        rows,
        columns,
        bits,
        0 if groups == 1 and scales.shape[1] == 1 else size // step if size >= step else -(step // size),
        packed,
        _factors(_narrow(scales), repeats, groups),
        None if zeros is None else _factors(zeros, repeats, groups),
        torch.zeros(TOKEN_TILES * len(packed), dtype=torch.int32, device=codes.device),
    )


def _pack_block(codes: torch.Tensor, steps: int, bits: int) -> torch.Tensor:
    parts = 16 // bits
    padding = (0, steps * STEP_UNITS * parts - codes.shape[1], 0, -len(codes) % _ROWS_MULTIPLE)
    split = F.pad(codes, padding).view(-1, TILE_ROWS, steps, parts, STEP_UNITS)
    units = torch.zeros_like(split[:, :, :, 0], dtype=torch.int32)
    for part in range(parts):
        units |= split[:, :, :, part].to(torch.int32) << bits * part
    return units.to(torch.int16).transpose(1, 2).contiguous()


def _factors(values: torch.Tensor, repeats: int, groups: int) -> torch.Tensor:
    """[N, G] as [tiles, groups, 64], zeros where there is no channel or group."""
    values = values.repeat_interleave(repeats, dim=1)
    multiple = _ROWS_MULTIPLE if groups > 1 else _SCALES_MULTIPLE
    values = F.pad(values, (0, groups - values.shape[1], 0, -len(values) % multiple))
    return values.view(-1, TILE_ROWS, groups).transpose(1, 2).contiguous()


def _narrow(scales: torch.Tensor) -> torch.Tensor:
    """The same numbers in 16 bits where they fit, else in float32."""
    if scales.dtype in (torch.float16, torch.bfloat16):
        return scales
    wide = scales.float()
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(wide.to(dtype).float(), wide):
            return wide.to(dtype)
    return wide
