"""Launches the CUDA kernels of `linear`, and keeps the memory in which programs meet."""

from dataclasses import dataclass
from typing import Protocol

import torch
import triton

from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.linear_gemv_triton import gemv_kernel
from bladellm_kernels.linear_hopper import described, hopper_linear_kernel, takes
from bladellm_kernels.linear_outputs_hopper import NormBehind, NormInFront
from bladellm_kernels.linear_schedules import DotSchedule, GemvSchedule, HopperSchedule, Schedule
from bladellm_kernels.linear_sums_hopper import Tile
from bladellm_kernels.linear_triton import linear_kernel
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.power_of_two import power_of_two


@dataclass(frozen=True, slots=True)
class NextNorm:
    """Where the `DelayedNorm` of a call's outputs goes: weight [N], weighted [M, N] contiguous, squares float32 [M, P].

    P: as many as the schedule has blocks of outputs.
    """

    weight: torch.Tensor
    weighted: torch.Tensor
    squares: torch.Tensor


class NormedCall(Protocol):
    """A call of a linear layer: the norm that x is the weighted part of, and that of the outputs."""

    @property
    def front(self) -> DelayedNorm | None: ...

    @property
    def behind(self) -> NextNorm | None: ...


@dataclass(frozen=True, slots=True)
class LinearCall:
    """x [M, K], weight [parts · N, K], bias [parts · N] or None, residual [M, N] or None, out [M, N]; last strides 1.

    parts: 2 where out is `silu(first N) · second N`, else 1. front: the norm that x is the weighted part of; behind:
    that of the outputs; with either of them the schedule is one for Hopper, and out may be float32.
    """

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    out: torch.Tensor
    parts: int
    front: DelayedNorm | None = None
    behind: NextNorm | None = None

    @property
    def outputs(self) -> int:
        return self.out.shape[1]

    @property
    def inputs(self) -> int:
        return self.x.shape[1]

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """From row to row of x, weight, residual and out."""
        residual = 0 if self.residual is None else self.residual.stride(0)
        return self.x.stride(0), self.weight.stride(0), residual, self.out.stride(0)


@dataclass(frozen=True, slots=True)
class LinearWorkspace:
    """partial: float32 sums of divided blocks; counters: int32, of the programs that left theirs, 0 between calls."""

    partial: torch.Tensor
    counters: torch.Tensor

    def holds(self, partial: int, counters: int) -> bool:
        return len(self.partial) >= partial and len(self.counters) >= counters


_workspaces: dict[tuple[torch.device, int], list[LinearWorkspace]] = {}
"""By device and stream, the newest last. Older ones stay: captured graphs have their addresses."""


def launch(call: LinearCall, schedule: Schedule) -> None:
    """Run one kernel on the current stream of a CUDA device.

    Calls on one stream share memory, so a graph must not be replayed beside another one captured on the same stream.
    Raises RuntimeError where that memory would have to be allocated while a graph is captured: call it once before;
    ValueError where x has more rows than the schedule, or its kernel has no norms or cannot read x or the weight.
    """
    if (call.front or call.behind) and not isinstance(schedule, HopperSchedule):
        raise ValueError(f"only kernels for Hopper have norms, got {schedule}")
    if isinstance(schedule, GemvSchedule):
        launch_gemv(call, schedule)
        return
    programs = multiprocessors(call.x.device) * schedule.programs or triton.cdiv(call.outputs, schedule.block_n)
    workspace = _workspace(call.x.device, *workspace_sizes(call, schedule, programs))
    if isinstance(schedule, DotSchedule):
        launch_dot(call, schedule, programs, workspace)
    elif takes(call.x, call.weight):
        launch_hopper(call, schedule, programs, workspace)
    else:
        raise ValueError("x and weight must be of half precision on a Hopper, rows of both at whole 16 bytes")


def launch_gemv(call: LinearCall, schedule: GemvSchedule) -> None:
    """Up to four rows; a program for every block of outputs."""
    tile_bytes = call.parts * schedule.block_n * schedule.block_k * call.weight.element_size()
    gemv_kernel[(triton.cdiv(call.outputs, schedule.block_n),)](
        call.x, call.weight, call.bias, call.residual, call.out, call.outputs, call.inputs, *call.strides,
        ROWS=len(call.x),
        BLOCK_N=schedule.block_n,
        BLOCK_K=schedule.block_k,
        PREFETCH=_tiles(schedule.prefetch, tile_bytes),
        EVEN=call.inputs % schedule.block_k == 0,
        PARTS=call.parts,
        num_warps=schedule.warps,
        **early_launch(call.x.device),
    )  # fmt: skip


def launch_dot(call: LinearCall, schedule: DotSchedule, programs: int, workspace: LinearWorkspace) -> None:
    """Rows up to the schedule's block_m. ValueError where they are more."""
    if len(call.x) > schedule.block_m:
        raise ValueError(f"x has {len(call.x)} rows, the schedule holds {schedule.block_m}")
    length = triton.cdiv(call.inputs, schedule.block_k)
    total = triton.cdiv(call.outputs, schedule.block_n) * length
    programs = min(programs, total)
    tile_bytes = call.parts * schedule.block_n * schedule.block_k * call.weight.element_size()
    linear_kernel[(programs,)](
        call.x, call.weight, call.bias, call.residual, call.out, workspace.partial, workspace.counters,
        len(call.x), call.outputs, call.inputs, *call.strides,
        BLOCK_M=schedule.block_m,
        BLOCK_N=schedule.block_n,
        BLOCK_K=schedule.block_k,
        STAGES=schedule.stages,
        SEGMENTS=most_segments(length, total, programs),
        PREFETCH=_tiles(schedule.prefetch, tile_bytes),
        EVEN=call.inputs % schedule.block_k == 0,
        PARTS=call.parts,
        UPCAST=call.x.is_cpu,
        num_warps=schedule.warps,
        **early_launch(call.x.device),
    )  # fmt: skip


def launch_hopper(call: LinearCall, schedule: HopperSchedule, programs: int, workspace: LinearWorkspace) -> None:
    """Rows up to the schedule's block_m. ValueError where they are more."""
    if len(call.x) > schedule.block_m:
        raise ValueError(f"x has {len(call.x)} rows, the schedule holds {schedule.block_m}")
    tile = tile_of(call, schedule)
    length = triton.cdiv(call.inputs, tile.inputs)
    total = triton.cdiv(call.outputs, tile.outputs) * length
    programs = min(programs, total)
    hopper_linear_kernel[(programs,)](
        described(call.x, tile.rows, tile.inputs), described(call.weight, tile.outputs, tile.inputs),
        call.weight, call.weight.stride(0), call.bias, call.residual, call.out, *norm_arguments(call),
        workspace.partial, workspace.counters, len(call.x), call.outputs, call.inputs, *call.strides[2:],
        TILE=tile,
        SEGMENTS=most_segments(length, total, programs),
        num_warps=schedule.warps,
        **early_launch(call.x.device),
    )  # fmt: skip


def tile_of(call: LinearCall, schedule: HopperSchedule) -> Tile:
    """What the kernel for Hopper is compiled for."""
    columns = schedule.prefetch // (call.parts * schedule.block_n * call.weight.element_size())
    squares = power_of_two(call.front.squares.shape[1]) if call.front else 0
    return Tile(
        schedule.block_m, schedule.block_n, schedule.block_k, schedule.stages, schedule.warps, call.parts,
        schedule.late, columns, squares,
    )  # fmt: skip


def norm_arguments(call: NormedCall) -> tuple[NormInFront | None, NormBehind | None]:
    """The norms of a call as its kernel takes them."""
    front, behind = call.front, call.behind
    return (
        None if front is None else NormInFront(front.squares, front.squares.shape[1], front.eps),
        None if behind is None else NormBehind(behind.weight, behind.weighted, behind.squares),
    )


def workspace_sizes(call: LinearCall, schedule: DotSchedule | HopperSchedule, programs: int) -> tuple[int, int]:
    """Numbers of partial sums and of counters: two slots a program, and a counter a block of outputs."""
    if schedule.programs == 0:
        return 0, 0
    slot = call.parts * schedule.block_n * schedule.block_m
    return 2 * programs * slot, triton.cdiv(call.outputs, schedule.block_n)


def most_segments(length: int, total: int, programs: int) -> int:
    """Programs that one block of `length` tiles can be divided among, rounded up to a power of two.

    Each program has total // programs tiles at least.
    """
    if total == programs * length:
        return 1
    return power_of_two(min(programs, (length - 2) // (total // programs) + 2)) if length > 1 else 1


def new_workspace(device: torch.device, partial: int, counters: int) -> LinearWorkspace:
    """Memory for calls one after another; sizes in numbers."""
    return LinearWorkspace(
        torch.empty(partial, dtype=torch.float32, device=device),
        torch.zeros(counters, dtype=torch.int32, device=device),
    )


def _workspace(device: torch.device, partial: int, counters: int) -> LinearWorkspace:
    held = _workspaces.setdefault((device, torch.cuda.current_stream(device).cuda_stream), [])
    if held and held[-1].holds(partial, counters):
        return held[-1]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError("a linear layer's workspace must exist before a graph is captured: run it once before")
    if held:
        partial, counters = max(partial, len(held[-1].partial)), max(counters, len(held[-1].counters))
    held.append(new_workspace(device, partial, counters))
    return held[-1]


def _tiles(size: int, tile_bytes: int) -> int:
    """Whole tiles in `size` bytes, a power of two, or none."""
    tiles = size // tile_bytes
    return power_of_two(tiles + 1) // 2 if tiles else 0
