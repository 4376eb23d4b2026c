"""The CUDA kernels behind `rank_copies`: wait for the other rank's rows, and add them, the residual and the norm."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.rank_words_triton import MOST_POLLS, end_wait
from bladellm_kernels.row_schedule import FEW_ROWS, row_schedule


@triton.jit(do_not_specialize=["number"])  # type: ignore[untyped-decorator]
def wait_for_rows_kernel(
    count: tl.tensor, number: tl.tensor, POLLS: tl.constexpr, EARLY: tl.constexpr
) -> None:  # fmt: skip
    """Wait until count, int32, has come to number; both count round through all 32 bits."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    # Volatile: from the L2 cache, in which the other GPU writes, and every time.
    ahead = tl.load(count, volatile=True) - number
    polls = 0
    while (ahead < 0) & (polls < POLLS):
        ahead = tl.load(count, volatile=True) - number
        polls += 1
    end_wait((ahead < 0).to(tl.int32))


@triton.jit  # type: ignore[untyped-decorator]
def add_both_norm_kernel(
    first: tl.tensor, second: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, eps: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row: the sum of both ranks and the residual in float32, rounded once, and its norm."""
    let_next_start(EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < N
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_inputs(EARLY)
    place = tl.program_id(0).to(tl.int64) * N + column
    row = tl.load(first + place, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(second + place, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    rounded = row.to(residual.dtype.element_ty)
    tl.store(residual + place, rounded, mask=inside)
    row = rounded.to(tl.float32)
    normed = row * tl.rsqrt(tl.sum(row * row, axis=0) / N + eps) * factor
    tl.store(out + place, normed.to(out.dtype.element_ty), mask=inside)


def launch_wait_for_rows(count: torch.Tensor, number: int, polls: int = MOST_POLLS) -> None:
    """Let the current stream wait until count, int32 [1], has come to number, of 32 bits with a sign."""
    wait_for_rows_kernel[(1,)](count, number, polls, num_warps=1, **early_launch(count.device))


def launch_add_both_norm(
    first: torch.Tensor,
    second: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
) -> None:
    """Add first and second to residual, in place, and write its norm to out; all [rows, N], contiguous, of one type."""
    rows, columns = residual.shape
    block, warps = row_schedule(columns, residual.element_size(), rows <= FEW_ROWS)
    add_both_norm_kernel[(rows,)](
        first, second, residual, weight, out, eps, columns, block, num_warps=warps, **early_launch(residual.device)
    )
