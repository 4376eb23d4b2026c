"""The CUDA kernel of `stacked_expand_silu_mul` for more rows than adapters: a program reads a block of B once for many.

B of all slots side by side is one matrix, [outputs, slots · R], and h of all rows another one, which is 0 but for each
row's own slot: their product is one of tensor cores. Slots that no row of the program has are not read.
"""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.lora_stacked import StackedOutputs
from bladellm_kernels.lora_stacked_triton import front_of
from bladellm_kernels.power_of_two import power_of_two

TILED = True
"""A switch for measuring; without it all rows read B by themselves."""

BLOCK_M, BLOCK_N, BLOCK_K, MOST_STEPS = 32, 64, 128, 4
"""Rows, outputs and columns of B that a program multiplies at once; and how many times at most."""

LEAST_ROWS, LEAST_RANKS, SHARED = 16, 8, 2
"""Of a step; of an adapter, whose ranks are loaded at once; and rows for each slot, without which no two rows may have
the same adapter."""


def takes_tiles(given: StackedOutputs) -> bool:
    """Whether rows are enough, and slots few enough, for B to be read less often."""
    half = given.y.dtype == given.b.dtype and given.b.element_size() == 2
    ranks = given.b.shape[2]
    if ranks != power_of_two(ranks) or not LEAST_RANKS <= ranks <= BLOCK_K:
        return False
    few = SHARED * len(given.b) <= min(len(given.y), BLOCK_M) and _steps(given) <= MOST_STEPS
    return TILED and half and few and len(given.y) >= LEAST_ROWS


@triton.jit  # type: ignore[untyped-decorator]
def block_of_b(
    b: tl.tensor, used: tl.tensor, of: tl.tensor, output: tl.tensor, end: tl.tensor, b_stride: tl.tensor,
    RANKS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[outputs, slots · R] of the slots `of` that are `used`. In three dimensions, so that masks are seen to be
    the same for all ranks of a slot: then loads are wide."""
    rank = tl.arange(0, RANKS)
    place = of.to(tl.int64)[None, :, None] * b_stride + output[:, None, None] * RANKS + rank[None, None, :]
    mask = (output < end)[:, None, None] & used[None, :, None]
    return tl.reshape(tl.load(b + place, mask=mask, other=0.0), (output.shape[0], of.shape[0] * RANKS))


@triton.jit  # type: ignore[untyped-decorator]
def block_of_h(
    y: tl.tensor, own: tl.tensor, of: tl.tensor, row: tl.tensor, RANKS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """[rows, slots · R] of h, 0 where a slot is not the row's `own`. row: where y has the rows."""
    rank = tl.arange(0, RANKS)
    place = row[:, None, None] + of[None, :, None] * (2 * RANKS) + rank[None, None, :]
    return tl.reshape(tl.load(y + place, mask=own[:, :, None], other=0.0), (row.shape[0], of.shape[0] * RANKS))


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def stacked_silu_tiles_kernel(
    y: tl.tensor, b: tl.tensor, scales: tl.tensor, slots: tl.tensor, bias: tl.tensor, squares: tl.tensor,
    out: tl.tensor, tokens: tl.tensor, rows: tl.tensor, y_stride: tl.tensor, b_stride: tl.tensor,
    scale_stride: tl.tensor, parts: tl.tensor, inputs: tl.tensor, eps: tl.tensor, RANKS: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr, READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (block of outputs, block of tokens). The first block of B is loaded before y is ready."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    token = (tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    present = token < tokens
    slot = tl.load(slots + token, mask=present, other=-1)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    of = tl.arange(0, BLOCK_S)
    own = slot[:, None] == of[None, :]
    used = tl.max(own.to(tl.int32), 0) > 0
    gate_weight = block_of_b(b, used, of, output, rows, b_stride, RANKS)
    up_weight = block_of_b(b + rows * RANKS, used, of, output, rows, b_stride, RANKS)
    gate_scale = tl.load(scales + slot * scale_stride, mask=slot >= 0, other=0.0)
    up_scale = tl.load(scales + slot * scale_stride + 1, mask=slot >= 0, other=0.0)
    if READY:
        wait_for_inputs(EARLY)
    row = token * y_stride
    gate_h = block_of_h(y + 2 * rows, own, of, row, RANKS)
    up_h = block_of_h(y + 2 * rows + RANKS, own, of, row, RANKS)
    gate_sums = tl.dot(gate_weight, tl.trans(gate_h), input_precision="ieee")
    up_sums = tl.dot(up_weight, tl.trans(up_h), input_precision="ieee")
    for _step in tl.static_range(1, STEPS):
        of += BLOCK_S
        own = slot[:, None] == of[None, :]
        used = tl.max(own.to(tl.int32), 0) > 0
        gate_weight = block_of_b(b, used, of, output, rows, b_stride, RANKS)
        up_weight = block_of_b(b + rows * RANKS, used, of, output, rows, b_stride, RANKS)
        gate_h = block_of_h(y + 2 * rows, own, of, row, RANKS)
        up_h = block_of_h(y + 2 * rows + RANKS, own, of, row, RANKS)
        gate_sums = tl.dot(gate_weight, tl.trans(gate_h), gate_sums, input_precision="ieee")
        up_sums = tl.dot(up_weight, tl.trans(up_h), up_sums, input_precision="ieee")
    source = y + row[None, :]
    mask = (output < rows)[:, None] & present[None, :]
    gate = tl.load(source + output[:, None], mask=mask, other=0.0).to(tl.float32) + gate_sums * gate_scale[None, :]
    up = tl.load(source + rows + output[:, None], mask=mask, other=0.0).to(tl.float32) + up_sums * up_scale[None, :]
    if squares is not None:
        part = tl.arange(0, BLOCK_P)
        asked = present[:, None] & (part < parts)[None, :]
        found = tl.load(squares + token[:, None] * parts + part[None, :], mask=asked, other=0.0)
        factor = tl.rsqrt(tl.sum(found, 1) / inputs + eps)
        gate *= factor[None, :]
        up *= factor[None, :]
    if bias is not None:
        gate += tl.load(bias + output, mask=output < rows, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias + rows + output, mask=output < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out + token[None, :] * rows + output[:, None], gate * tl.sigmoid(gate) * up, mask=mask)


def launch_stacked_silu_tiles(given: StackedOutputs, out: torch.Tensor) -> None:
    """Write the gated outputs to `out`, [T, N / 2] contiguous, where the call `takes_tiles`. B of all slots that rows
    have must be finite."""
    tokens, rows = out.shape
    squares, parts, inputs, eps = front_of(given)
    ranks = given.b.shape[2]
    stacked_silu_tiles_kernel[(-(-rows // BLOCK_N), -(-tokens // BLOCK_M))](
        given.y, given.b, given.scales, given.adapters.slots, given.bias, squares, out, tokens, rows,
        given.y.stride(0), given.b.stride(0), given.scales.stride(0), parts, inputs, eps, RANKS=ranks,
        BLOCK_P=power_of_two(parts), BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_S=BLOCK_K // ranks, STEPS=_steps(given),
        READY=given.adapters.ready, num_warps=4, **early_launch(out.device),
    )  # fmt: skip


def _steps(given: StackedOutputs) -> int:
    return -(-len(given.b) * given.b.shape[2] // BLOCK_K)
