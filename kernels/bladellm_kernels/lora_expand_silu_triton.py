"""The CUDA kernel of `lora_expand_silu_mul`: a program for a block of a token's gated outputs."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.lora_beside import adapter_launch
from bladellm_kernels.lora_tokens import TokenAdapters
from bladellm_kernels.power_of_two import power_of_two

TILE_NUMBERS, LEAST_OUTPUTS = 4096, 32
"""Numbers of each half of B that a program holds; outputs of it at least."""


@triton.jit(do_not_specialize=["tokens", "parts"])  # type: ignore[untyped-decorator]
def expand_silu_mul_kernel(
    h: tl.tensor, b: tl.tensor, slots: tl.tensor, y: tl.tensor, out: tl.tensor, tokens: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, b_stride: tl.tensor, y_stride: tl.tensor, RANKS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, block of outputs). B is loaded before h and y are ready."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    part, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R)
    inside = output < rows
    used = (rank < RANKS) & (slot >= 0)
    place = b + slot * b_stride + output[:, None] * RANKS + rank[None, :]
    gate_weight = tl.load(place, mask=inside[:, None] & used[None, :], other=0.0)
    up_weight = tl.load(place + rows * RANKS, mask=inside[:, None] & used[None, :], other=0.0)
    if READY:
        wait_for_inputs(EARLY)
    place = h + (part * tokens + token)[:, None] * (2 * RANKS) + rank[None, :]
    mask = (part < parts)[:, None] & used[None, :]
    gate_ranks = tl.sum(tl.load(place, mask=mask, other=0.0), 0)
    up_ranks = tl.sum(tl.load(place + RANKS, mask=mask, other=0.0), 0)
    source = y + token.to(tl.int64) * y_stride + output
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    gate += tl.sum(gate_weight.to(tl.float32) * gate_ranks[None, :], 1)
    up = tl.load(source + rows, mask=inside, other=0.0).to(tl.float32)
    up += tl.sum(up_weight.to(tl.float32) * up_ranks[None, :], 1)
    tl.store(out + token.to(tl.int64) * rows + output, gate * tl.sigmoid(gate) * up, mask=inside)


def launch_expand_silu_mul(h: torch.Tensor, b: torch.Tensor, adapters: TokenAdapters, y: torch.Tensor) -> torch.Tensor:
    """As `lora_expand_silu_mul`, of tokens that are not in tiles."""
    parts, tokens, _ = h.shape
    rows, ranks = b.shape[1] // 2, b.shape[2]
    block_r = power_of_two(ranks)
    block_n = max(LEAST_OUTPUTS, TILE_NUMBERS // block_r)
    out = torch.empty(tokens, rows, dtype=y.dtype, device=y.device)
    if tokens:
        expand_silu_mul_kernel[(tokens, -(-rows // block_n))](
            h, b, adapters.slots, y, out, tokens, parts, rows, b.stride(0), y.stride(0), RANKS=ranks,
            BLOCK_P=power_of_two(parts), BLOCK_R=block_r, BLOCK_N=block_n, READY=adapters.ready, num_warps=4,
            **adapter_launch(adapters, y.device),
        )  # fmt: skip
    return out
