"""Random calls of `linear` into poisoned outputs, and its kernels without a GPU."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from bladellm_kernels import linear_launch as launches
from bladellm_kernels.delayed_norm import DelayedNorm
from bladellm_kernels.linear_launch import (
    LinearCall,
    NextNorm,
    launch_dot,
    launch_gemv,
    launch_hopper,
    new_workspace,
    workspace_sizes,
)
from bladellm_kernels.linear_schedules import DotSchedule, GemvSchedule, Schedule
from bladellm_kernels.linear_tile_triton import tile_sectors

from tests.kernels.hopper import products_left_under_way


def linear_call(sizes, dtype, parts=1, extras=False, device="cpu") -> LinearCall:
    """sizes: M, N, K. x and out are views of wider rows, NaN beside them; extras: bias and residual."""
    rows, outputs, inputs = sizes
    x = torch.full((rows, inputs + 16), torch.nan, dtype=dtype, device=device)[:, :inputs]
    x.copy_(torch.randn(rows, inputs))
    weight = torch.full((parts * outputs, inputs + 32), torch.nan, dtype=dtype, device=device)[:, :inputs]
    weight.copy_(torch.randn(parts * outputs, inputs) * inputs**-0.5)
    bias = torch.randn(parts * outputs).to(device, dtype) if extras else None
    residual = torch.randn(rows, outputs).to(device, dtype) if extras else None
    out = torch.full((rows + 1, outputs + 3), torch.nan, dtype=dtype, device=device)
    return LinearCall(x, weight, bias, residual, out[:rows, :outputs], parts)


def with_norms(call: LinearCall, blocks: int, front: bool, behind: bool) -> LinearCall:
    """The call with an x whose norm is delayed, its squares in three parts, or with a norm of its outputs, all NaN."""
    before, after = None, None
    if front:
        pieces = torch.tensor_split(torch.randn(call.x.shape).to(call.x.device), 3, dim=1)
        before = DelayedNorm(call.x, torch.stack([piece.square().sum(1) for piece in pieces], 1), 1e-5)
    if behind:
        weighted = torch.full_like(call.out, torch.nan, memory_format=torch.contiguous_format)
        squares = torch.full((len(call.x), blocks), torch.nan, device=call.x.device)
        after = NextNorm(torch.randn_like(call.out[0]), weighted, squares)
    return replace(call, front=before, behind=after)


def run(call: LinearCall, schedule: Schedule, programs: int = 1) -> torch.Tensor:
    """Launch in poisoned memory; what is beside the output stays poison, and counters are 0 again."""
    if isinstance(schedule, GemvSchedule):
        launch_gemv(call, schedule)
    else:
        workspace = new_workspace(call.x.device, *workspace_sizes(call, schedule, programs))
        workspace.partial.fill_(torch.nan)
        launch_dot(call, schedule, programs, workspace)
        assert not workspace.counters.any()
    rows, outputs = call.out.shape
    whole = call.out._base
    assert whole[rows:].isnan().all()
    assert whole[:, outputs:].isnan().all()
    return call.out


def compiled_for_hopper(monkeypatch, sizes, schedule: Schedule, parts: int, dtype=torch.bfloat16, norms=()):
    """A kernel as the launch compiles it for sm_90, without a GPU. norms: among front and behind."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class Hopper:
        def get_current_device(self):
            return 0

        def get_current_stream(self, device):
            return 0

        def get_current_target(self):
            return GPUTarget("cuda", 90, 32)

    compiled = []
    original = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        as_on_cuda = {"UPCAST": False} if "UPCAST" in options else {}
        compiled.append(original(self, *arguments, grid=grid, warmup=True, **(options | as_on_cuda)))

    monkeypatch.setattr(driver, "_active", Hopper())
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(launches, "early_launch", lambda device: {"EARLY": True, "launch_pdl": True})
    rows, outputs, inputs = sizes
    x, out = torch.empty(rows, inputs, dtype=dtype), torch.empty(rows, outputs, dtype=dtype)
    residual = torch.empty_like(out) if "behind" in norms else None
    call = LinearCall(x, torch.empty(parts * outputs, inputs, dtype=dtype), None, residual, out, parts)
    if norms:
        call = with_norms(call, -(-outputs // schedule.block_n), "front" in norms, "behind" in norms)
    if isinstance(schedule, GemvSchedule):
        launch_gemv(call, schedule)
    else:
        programs = 132 * schedule.programs or -(-outputs // schedule.block_n)
        launch_tiles = launch_dot if isinstance(schedule, DotSchedule) else launch_hopper
        launch_tiles(call, schedule, programs, new_workspace(x.device, 16, 16))
    assert not products_left_under_way(compiled[0].asm["ttgir"])
    return compiled[0]


@triton.jit
def store_sectors_kernel(
    numbers,
    outputs,
    inputs,
    first,
    end,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
    SECTOR: tl.constexpr,
):
    """Where `tile_sectors` says that sectors of a contiguous weight begin, as numbers from its start."""
    output, column = tile_sectors(outputs, inputs, first, end, BLOCK_N, BLOCK_K, TILES, SECTOR)
    row, sector = tl.arange(0, BLOCK_N), tl.arange(0, TILES * BLOCK_K // SECTOR)
    tl.store(numbers + row[:, None] * (TILES * BLOCK_K // SECTOR) + sector[None, :], output * inputs + column)
