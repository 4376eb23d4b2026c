"""The CUDA kernel of `embedding`."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs

BLOCK, WARPS = 1024, 4
"""Columns and warps of a program: 16 bytes a thread in 16 bits."""


@triton.jit  # type: ignore[untyped-decorator]
def embedding_kernel(
    ids: tl.tensor, weight: tl.tensor, slots: tl.tensor, out: tl.tensor, stride: tl.tensor, out_stride: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a block of columns of a token's row. slots is None where ids are in the order of the tokens."""
    let_next_start(EARLY)
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    wait_for_inputs(EARLY)
    place = token
    if slots is not None:
        place = tl.load(slots + token)
    row = tl.load(weight + tl.load(ids + place) * stride + column, mask=inside)
    tl.store(out + token * out_stride + column, row, mask=inside)


def launch_embedding(ids: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor | None, out: torch.Tensor) -> None:
    """out: [T, N], its last stride 1."""
    tokens, columns = out.shape
    if tokens == 0 or columns == 0:
        return
    embedding_kernel[(tokens * -(-columns // BLOCK),)](
        ids, weight, slots, out, weight.stride(0), out.stride(0), columns, BLOCK,
        num_warps=WARPS, **early_launch(out.device),
    )  # fmt: skip
