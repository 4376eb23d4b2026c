"""The CUDA kernels of `silu_mul`: blocks of columns, or whole rows that are rounded to 8 bits."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.row_codes_triton import store_row_codes
from bladellm_kernels.row_schedule import FEW_ROWS, row_schedule

BLOCK, WARPS = 1024, 4
"""Columns and warps of a program: 16 bytes of gate and of up a thread in 16 bits, twice as many of many rows."""

QUANT_WARPS = 32


@triton.jit  # type: ignore[untyped-decorator]
def gated(gate_up: tl.tensor, column: tl.tensor, inside: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """silu(gate) · up in the type of both; gate_up: of a row."""
    gate = tl.load(gate_up + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + N + column, mask=inside, other=0.0).to(tl.float32)
    return (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty)


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(
    gate_up: tl.tensor, out: tl.tensor, stride: tl.tensor, out_stride: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a block of columns of a row."""
    let_next_start(EARLY)
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    wait_for_inputs(EARLY)
    tl.store(out + row * out_stride + column, gated(gate_up + row * stride, column, inside, N), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_quant_kernel(
    gate_up: tl.tensor, codes: tl.tensor, scales: tl.tensor, stride: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, LARGEST: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    wait_for_inputs(EARLY)
    product = gated(gate_up + row * stride, column, inside, N).to(tl.float32)
    store_row_codes(product, codes + row * N, scales + row, column, inside, LARGEST)


def launch_silu_mul(
    gate_up: torch.Tensor, out: torch.Tensor, block: int | None = None, warps: int | None = None
) -> None:
    """gate_up: [T, 2 · N]; out: [T, N]; their last strides are 1."""
    rows, columns = out.shape
    if rows == 0 or columns == 0:
        return
    block = block or (BLOCK if rows <= FEW_ROWS else 2 * BLOCK)
    silu_mul_kernel[(rows * -(-columns // block),)](
        gate_up, out, gate_up.stride(0), out.stride(0), columns, block,
        num_warps=warps or WARPS, **early_launch(out.device),
    )  # fmt: skip


def launch_silu_mul_quant(
    gate_up: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, largest: float, warps: int | None = None
) -> None:
    """gate_up: [T, 2 · N]; codes: [T, N], contiguous; scales: [T, 1]."""
    rows, columns = codes.shape
    if rows == 0 or columns == 0:
        return
    block, most = row_schedule(columns, gate_up.element_size(), rows <= FEW_ROWS, QUANT_WARPS)
    silu_mul_quant_kernel[(rows,)](
        gate_up, codes, scales, gate_up.stride(0), columns, block, largest,
        num_warps=warps or most, **early_launch(codes.device),
    )  # fmt: skip
