"""The CUDA kernel of `merge_states`: a program merges some (token, head) rows of all states."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.prefill_merge import State

ROWS = 16
WARPS = 4


class Part(NamedTuple):
    """A state and its strides."""

    out: torch.Tensor
    token_stride: int
    head_stride: int
    lse: torch.Tensor
    lse_token_stride: int
    lse_head_stride: int


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def merge_states_kernel(
    parts: tl.tensor,
    out: tl.tensor,
    out_token_stride: tl.tensor,
    out_head_stride: tl.tensor,
    lse_out: tl.tensor,
    rows: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """rows: tokens × HEADS. lse_out: float32 [rows], contiguous."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    dim = tl.arange(0, BLOCK_D)
    real = inside[:, None] & (dim < HEAD_DIM)[None, :]
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    for index in tl.static_range(PARTS):
        part = parts[index]
        places = token * part.lse_token_stride + head * part.lse_head_stride
        lse = tl.load(part.lse + places, mask=inside, other=0.0)
        places = token * part.token_stride + head * part.head_stride
        attended = tl.load(part.out + places[:, None] + dim[None, :], mask=real, other=0.0).to(tl.float32)
        higher = tl.maximum(peak, lse)
        fade, weight = tl.exp(peak - higher), tl.exp(lse - higher)
        acc = acc * fade[:, None] + attended * weight[:, None]
        total = total * fade + weight
        peak = higher
    places = token * out_token_stride + head * out_head_stride
    merged = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + places[:, None] + dim[None, :], merged, mask=real)
    tl.store(lse_out + row, peak + tl.log(total), mask=inside)


def launch(states: Sequence[State], out: torch.Tensor) -> torch.Tensor:
    """`merge_states` by one kernel. Returns the log-sum-exp [n, Hq]."""
    tokens, heads, head_dim = out.shape
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out.device)
    parts = tuple(
        Part(each, each.stride(0), each.stride(1), its_lse, its_lse.stride(0), its_lse.stride(1))
        for each, its_lse in states
    )
    merge_states_kernel[(triton.cdiv(tokens * heads, ROWS),)](
        parts, out, out.stride(0), out.stride(1), lse, tokens * heads,
        HEADS=heads, HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), ROWS=ROWS, PARTS=len(parts),
        num_warps=WARPS,
    )  # fmt: skip
    return lse
