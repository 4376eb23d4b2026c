"""The CUDA kernel of `widen`."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs

BLOCK, WARPS = 2048, 4


@triton.jit  # type: ignore[untyped-decorator]
def widen_kernel(x: tl.tensor, out: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr) -> None:
    """One program a block of a row of N numbers: their count is a constant, so that 16 bytes are read at a time."""
    let_next_start(EARLY)
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    place = (tl.program_id(0) // BLOCKS).to(tl.int64) * N + column
    wait_for_inputs(EARLY)
    tl.store(out + place, tl.load(x + place, mask=column < N).to(tl.float32), mask=column < N)


def launch_widen(x: torch.Tensor, out: torch.Tensor) -> None:
    """Both contiguous, of one shape."""
    count, columns = x.numel(), x.shape[-1]
    if count:
        grid = (count // columns * -(-columns // BLOCK),)
        widen_kernel[grid](x, out, columns, BLOCK, num_warps=WARPS, **early_launch(out.device))
