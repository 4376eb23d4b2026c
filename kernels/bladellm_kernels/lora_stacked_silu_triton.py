"""The CUDA kernel of `stacked_expand_silu_mul`: a program for a block of a token's gated outputs."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.lora_stacked import StackedOutputs
from bladellm_kernels.lora_stacked_triton import block_of, front_factor, front_of, own_ranks
from bladellm_kernels.power_of_two import power_of_two

TILE_NUMBERS = 4096
"""Numbers of each half of B that a program holds."""


@triton.jit  # type: ignore[untyped-decorator]
def stacked_silu_mul_kernel(
    y: tl.tensor, b: tl.tensor, scales: tl.tensor, slots: tl.tensor, bias: tl.tensor, squares: tl.tensor,
    out: tl.tensor, rows: tl.tensor, y_stride: tl.tensor, b_stride: tl.tensor, scale_stride: tl.tensor,
    parts: tl.tensor, inputs: tl.tensor, eps: tl.tensor, RANKS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, block of outputs). B is loaded before y is ready. bias and squares may be None."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rank = tl.arange(0, BLOCK_R)
    inside = output < rows
    used = inside[:, None] & ((rank < RANKS) & (slot >= 0))[None, :]
    place = b + slot * b_stride + output[:, None] * RANKS + rank[None, :]
    gate_weight = tl.load(place, mask=used, other=0.0)
    up_weight = tl.load(place + rows * RANKS, mask=used, other=0.0)
    gate_scale = tl.load(scales + slot * scale_stride, mask=slot >= 0, other=0.0)
    up_scale = tl.load(scales + slot * scale_stride + 1, mask=slot >= 0, other=0.0)
    if READY:
        wait_for_inputs(EARLY)
    source = y + token * y_stride
    gate_ranks = own_ranks(source + 2 * rows, 0, slot, gate_scale, 2, RANKS, BLOCK_R)
    up_ranks = own_ranks(source + 2 * rows, 1, slot, up_scale, 2, RANKS, BLOCK_R)
    gate = tl.load(source + output, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + rows + output, mask=inside, other=0.0).to(tl.float32)
    gate += tl.sum(gate_weight.to(tl.float32) * gate_ranks[None, :], 1)
    up += tl.sum(up_weight.to(tl.float32) * up_ranks[None, :], 1)
    if squares is not None:
        factor = front_factor(squares, token, parts, inputs, eps, BLOCK_P)
        gate *= factor
        up *= factor
    if bias is not None:
        gate += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + rows + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * rows + output, gate * tl.sigmoid(gate) * up, mask=inside)


def launch_stacked_silu_mul(given: StackedOutputs, out: torch.Tensor) -> None:
    """Write the gated outputs to `out`, [T, N / 2] contiguous."""
    if not len(out):
        return
    rows, block_n = out.shape[1], block_of(given, TILE_NUMBERS)
    squares, parts, inputs, eps = front_of(given)
    stacked_silu_mul_kernel[(len(out), -(-rows // block_n))](
        given.y, given.b, given.scales, given.adapters.slots, given.bias, squares, out, rows, given.y.stride(0),
        given.b.stride(0), given.scales.stride(0), parts, inputs, eps, RANKS=given.b.shape[2],
        BLOCK_P=power_of_two(parts), BLOCK_R=power_of_two(given.b.shape[2]), BLOCK_N=block_n,
        READY=given.adapters.ready, num_warps=4, **early_launch(out.device),
    )  # fmt: skip
