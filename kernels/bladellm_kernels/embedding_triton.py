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
    first: tl.tensor, rows: tl.tensor, N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One program a block of columns of a token's row. slots is None where ids are in the order of the tokens, first
    where weight has a row for every id; else it has `rows` of them from `first` on."""
    let_next_start(EARLY)
    BLOCKS: tl.constexpr = (N + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    wait_for_inputs(EARLY)
    place = token
    if slots is not None:
        place = tl.load(slots + token)
    found = tl.load(ids + place)
    if first is None:
        row = tl.load(weight + found * stride + column, mask=inside)
    else:
        found -= first
        row = tl.load(weight + found * stride + column, mask=inside & (found >= 0) & (found < rows), other=0.0)
    tl.store(out + token * out_stride + column, row, mask=inside)


def launch_embedding(
    ids: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor | None, out: torch.Tensor, first: int | None = None
) -> None:
    """out: [T, N], its last stride 1."""
    tokens, columns = out.shape
    if tokens == 0 or columns == 0:
        return
    embedding_kernel[(tokens * -(-columns // BLOCK),)](
        ids, weight, slots, out, weight.stride(0), out.stride(0), first, len(weight), columns, BLOCK,
        num_warps=WARPS, **early_launch(out.device),
    )  # fmt: skip
