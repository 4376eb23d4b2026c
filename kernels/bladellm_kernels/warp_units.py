"""Linear layers of a `UnitWeight` in 4 bits for a few tokens on a Hopper, by warps that each have a ring of their own.

`warp_units.cu` is the kernel. Nothing makes its warps wait for one another before all their sums are there, and the
norm in front, the gate, the residual and the norm behind are part of it.
"""

import ctypes
import warnings
from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from bladellm_kernels.cuda_compiler import compile_cuda
from bladellm_kernels.cuda_kernel import CudaKernel, KeptLaunches
from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.hopper_parts import SHARED_BYTES
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.power_of_two import power_of_two
from bladellm_kernels.unit_call import UnitCall
from bladellm_kernels.unit_schedules import WarpRings
from bladellm_kernels.weight_units import UnitWeight

ROW_TILE = 16
MOST_TILES = 14
"""Of a CTA: of more, two rounds of CTAs are as good."""
WIDTHS = (2, 3, 1)
"""Tiles of a stage, the best first."""

_TILE_BYTES = 1024
_PIECE_BYTES = 16
"""That a thread copies at once."""
_LANES = 32
_STEP_REGISTERS, _OTHER_REGISTERS = 16, 48
"""That a step's inputs take of a thread, beside the sums of each group, and all else."""
_REGISTERS = 65536
"""Of a multiprocessor."""
_TYPES = (torch.bfloat16, torch.float16)
_SOURCE = Path(__file__).with_suffix(".cu")
PARTS = "warp_instructions.cu", "warp_lane.cu", "warp_unit_memory.cu", "warp_units.cu"
"""Files of the kernel's text, in this order."""

_launches = KeptLaunches()


class Problem(ctypes.Structure):
    """The kernel's argument, by its names."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "codes", "scales", "zeros", "bias", "residual", "out")),
        *((name, c_void_p) for name in ("front_squares", "norm_weight", "weighted", "squares")),
        *((name, c_int) for name in ("x_stride", "residual_stride", "out_stride")),
        *((name, c_int) for name in ("tokens", "outputs", "groups", "front_parts")),
        *((name, c_float) for name in ("inputs", "eps")),
    )


@dataclass(frozen=True, slots=True)
class WarpPlan:
    """What the kernel is compiled for, by the names of `warp_units.cu`, and its grid.

    A CTA has turns · width tiles of 16 rows of the weight; tokens: 1, 2, 4 or 8. zeros to bias: what there is.
    """

    schedule: WarpRings
    grid: int
    steps: int
    turns: int
    width: int
    tokens: int
    half: bool
    half_scales: bool
    zeros: bool
    group_steps: int
    gated: bool
    front: bool
    behind: bool
    residual: bool
    bias: bool

    @property
    def groups(self) -> int:
        """Of a step."""
        return max(1, -self.group_steps)

    @property
    def kept(self) -> int:
        """Steps of a warp whose inputs stay in registers from turn to turn, all of them or none."""
        steps = -(-self.steps // self.schedule.warps)
        most = (self.registers - _OTHER_REGISTERS) // (_STEP_REGISTERS + 4 * self.groups)
        return steps if self.turns > 1 and steps <= most else 0

    @property
    def shared_bytes(self) -> int:
        """Of a CTA."""
        room = Room(self.schedule, self.tokens, self.groups * (3 if self.zeros else 2))
        return self.schedule.warps * (room.ring_bytes(self.width) + room.sum_bytes(self.turns * self.width))

    @property
    def registers(self) -> int:
        """Most of a thread."""
        return min(255, _REGISTERS // (_LANES * self.schedule.warps * self.schedule.ctas_per_sm) // 8 * 8)


def takes(weight: UnitWeight) -> bool:
    """Whether the kernel is for a weight, 4 bits in whole tiles and steps with scales of 16 bits, and for its device,
    and can be compiled."""
    return fits(weight) and is_hopper(weight.codes.device) and _runs_on(weight.codes.get_device())


def fits(weight: UnitWeight) -> bool:
    """Whether the kernel is for such a weight."""
    whole = weight.columns % weight.step == 0 and weight.rows % ROW_TILE == 0
    return weight.bits == 4 and whole and weight.scales.dtype in _TYPES


@cache
def _runs_on(index: int) -> bool:
    """Whether the kernel, of the smallest plan, can be compiled and loaded; a warning says what stands in where not."""
    least = WarpPlan(WarpRings(2), 1, 1, 1, 1, 1, False, True, False, 1, False, False, False, False, False)
    try:
        _kernel(least, index)
    except (OSError, RuntimeError) as error:
        warnings.warn(f"4-bit layers of few tokens are left to Triton: {error}", stacklevel=2)
        return False
    return True


def warp_plan(call: UnitCall, schedule: WarpRings, processors: int) -> WarpPlan:
    """The launch of a call on so many multiprocessors, one round of CTAs where that can be. Raises ValueError where it
    has too many tokens, or gates of no whole tiles."""
    weight, gated = call.weight, call.parts > 1
    if call.tokens > schedule.tokens or call.outputs % ROW_TILE or not fits(weight) or call.x.dtype not in _TYPES:
        raise ValueError(f"{schedule} is for up to {schedule.tokens} tokens, whole tiles and 4 bits, got {call.tokens}")
    room = Room(schedule, power_of_two(call.tokens), factor_pieces(weight))
    divided = divided_tiles(call.outputs // ROW_TILE, gated, room, processors)
    return WarpPlan(
        schedule,
        grid=divided.grid,
        steps=weight.steps,
        turns=divided.turns,
        width=divided.width,
        tokens=room.tokens,
        half=call.x.dtype == torch.float16,
        half_scales=weight.scales.dtype == torch.float16,
        zeros=weight.zeros is not None,
        group_steps=weight.group_steps,
        gated=gated,
        front=call.front is not None,
        behind=call.behind is not None,
        residual=call.residual is not None,
        bias=call.bias is not None,
    )


def square_parts(tokens: int, weight: UnitWeight, schedule: WarpRings, processors: int) -> int:
    """Partial sums of squares that all CTAs leave of each token: of up to 32 outputs of theirs each."""
    room = Room(schedule, power_of_two(tokens), factor_pieces(weight))
    divided = divided_tiles(weight.rows // ROW_TILE, False, room, processors)
    outputs, slices = divided.turns * divided.width * ROW_TILE, schedule.warps // room.tokens
    return divided.grid * min(-(-outputs // _LANES), slices)


def factor_pieces(weight: UnitWeight) -> int:
    """Copies of a tile's scales and zero points in a step."""
    return max(1, -weight.group_steps) * (2 if weight.zeros is None else 3)


@dataclass(frozen=True, slots=True)
class Room:
    """Shared memory of a CTA's warps. tokens: a power of two; pieces: of a tile's scales and zero points in a step."""

    schedule: WarpRings
    tokens: int
    pieces: int

    def ring_bytes(self, width: int) -> int:
        """Of a warp."""
        return self.schedule.stages * width * (_TILE_BYTES + _PIECE_BYTES * self.pieces)

    def sum_bytes(self, tiles: int) -> int:
        """Of a warp: of each token the sums of a CTA's rows, and four numbers between tokens."""
        return 4 * self.tokens * (tiles * ROW_TILE + (4 if self.tokens > 1 else 0))

    def most_tiles(self, width: int) -> int:
        """Of a CTA, an even number, where stages have `width` of them."""
        left = SHARED_BYTES // self.schedule.warps - self.ring_bytes(width)
        return min(MOST_TILES, (left - self.sum_bytes(0)) // (4 * self.tokens * ROW_TILE) // 2 * 2)


@dataclass(frozen=True, slots=True)
class Divided:
    """Tiles of outputs by CTAs: most turns of one, and tiles of a turn."""

    grid: int
    turns: int
    width: int


def divided_tiles(tiles: int, gated: bool, room: Room, processors: int) -> Divided:
    """`tiles` tiles divided evenly among the multiprocessors, or more CTAs where one would have too many.

    Every multiprocessor gets a CTA, if there are enough tiles: two of the next kernel's would share one that has none
    of this kernel's. Raises ValueError where no tile fits beside the rings.
    """
    most = room.most_tiles(2) // 2 if gated else room.most_tiles(max(WIDTHS))
    if most < 1:
        raise ValueError(
            f"rings of {room.schedule.stages} stages of {room.schedule.warps} warps leave no room for sums"
        )
    grid = max(min(processors, tiles), -(-tiles // most))
    each = -(-tiles // grid)
    if gated:
        return Divided(grid, each, 2)
    fitting = [width for width in WIDTHS if width * room.pieces <= _LANES]
    width = next((width for width in fitting if each % width == 0), 1)
    return Divided(grid, each // width, width)


def launch(call: UnitCall, schedule: WarpRings) -> None:
    """One kernel on the current stream. The first launch of a plan compiles it: not while a graph is captured. Raises
    ValueError where the kernel is not for the call."""
    call, device = _aligned(call), call.x.device
    plan = warp_plan(call, schedule, multiprocessors(device))
    given = arguments(call)
    key = (plan, device.index, given)
    prepared = _launches.get(key)
    if prepared is None:
        kernel = _kernel(plan, device.index)
        grid, threads = (plan.grid, 1, 1), _LANES * schedule.warps
        prepared = _launches[key] = kernel.prepare(grid, threads, plan.shared_bytes, 1, True, Problem(*given))
    prepared.run()


def _aligned(call: UnitCall) -> UnitCall:
    """With rows of x that can be read 16 bytes at a time."""
    x = call.x
    if x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % _PIECE_BYTES == 0:
        return call
    return replace(call, x=x.clone(memory_format=torch.contiguous_format))


def arguments(call: UnitCall) -> tuple[int | float | None, ...]:
    """The fields of `Problem`."""
    weight, front, behind = call.weight, call.front, call.behind
    tensors: list[torch.Tensor | None] = [call.x, weight.codes, weight.scales, weight.zeros, call.bias]
    tensors += [call.residual, call.out, None if front is None else front.squares]
    tensors += [None] * 3 if behind is None else [behind.weight, behind.weighted, behind.squares]
    x_stride, _, residual_stride, out_stride = call.strides
    return (
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(x_stride, residual_stride, out_stride, call.tokens, call.outputs, weight.scales.shape[1]),
        *(front.squares.shape[1] if front else 0, float(weight.columns), front.eps if front else 0.0),
    )


def source(plan: WarpPlan) -> tuple[str, dict[str, int | str]]:
    """The kernel's text and the macros that it wants."""
    schedule = plan.schedule
    defines: dict[str, int | str] = {
        "STEPS": plan.steps,
        "KEPT": plan.kept,
        "TURNS": plan.turns,
        "WIDTH": plan.width,
        "STAGES": schedule.stages,
        "AHEAD": schedule.ahead or schedule.stages - 1,
        "WARPS": schedule.warps,
        "TOKENS": plan.tokens,
        "REGISTERS": plan.registers,
        "HALF": int(plan.half),
        "HALF_SCALES": int(plan.half_scales),
        "ZEROS": int(plan.zeros),
        "GROUP_PARTS": 4 // plan.groups,
        "GROUP_STEPS": max(0, plan.group_steps),
        "GATED": int(plan.gated),
        "FRONT": int(plan.front),
        "BEHIND": int(plan.behind),
        "RESIDUAL": int(plan.residual),
        "BIAS": int(plan.bias),
    }
    return "".join(_text(name) for name in PARTS), defines


@cache
def _text(name: str) -> str:
    return _SOURCE.with_name(name).read_text()


@cache
def _kernel(plan: WarpPlan, index: int) -> CudaKernel:
    text, defines = source(plan)
    return CudaKernel(compile_cuda(text, defines, name=_SOURCE.name), "warp_units", index)
