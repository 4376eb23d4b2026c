"""The CUDA kernels of `delayed_norm` and of the division that it leaves to others."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.power_of_two import power_of_two
from bladellm_kernels.row_schedule import FEW_ROWS, row_schedule


@triton.jit  # type: ignore[untyped-decorator]
def delayed_norm_kernel(
    x: tl.tensor, weight: tl.tensor, weighted: tl.tensor, squares: tl.tensor, x_stride: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row."""
    let_next_start(EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < N
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(x + place * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(weighted + place * N + column, (row * factor).to(x.dtype.element_ty), mask=inside)
    tl.store(squares + place, tl.sum(row * row, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def normed_kernel(
    weighted: tl.tensor, squares: tl.tensor, out: tl.tensor, parts: tl.tensor, eps: tl.tensor, N: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    place = tl.program_id(0).to(tl.int64)
    column, part = tl.arange(0, BLOCK), tl.arange(0, BLOCK_P)
    total = tl.sum(tl.load(squares + place * parts + part, mask=part < parts, other=0.0), axis=0)
    row = tl.load(weighted + place * N + column, mask=column < N, other=0.0).to(tl.float32)
    normed = row * tl.rsqrt(total / N + eps)
    tl.store(out + place * N + column, normed.to(out.dtype.element_ty), mask=column < N)


def launch_delayed_norm(x: torch.Tensor, weight: torch.Tensor, weighted: torch.Tensor, squares: torch.Tensor) -> None:
    """x: [M, H], its last stride 1; weighted: [M, H], squares: float32 [M, 1], both contiguous."""
    rows, columns = x.shape
    if rows == 0 or columns == 0:
        return
    block, warps = row_schedule(columns, x.element_size(), rows <= FEW_ROWS)
    delayed_norm_kernel[(rows,)](
        x, weight, weighted, squares, x.stride(0), columns, block, num_warps=warps, **early_launch(x.device)
    )


def launch_normed(weighted: torch.Tensor, squares: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """weighted, out: [M, H], squares: float32 [M, P], all contiguous."""
    rows, columns = weighted.shape
    if rows == 0 or columns == 0:
        return
    block, warps = row_schedule(columns, weighted.element_size(), rows <= FEW_ROWS)
    parts = squares.shape[1]
    normed_kernel[(rows,)](
        weighted, squares, out, parts, eps, columns, block, power_of_two(parts), num_warps=warps,
        **early_launch(weighted.device),
    )  # fmt: skip
