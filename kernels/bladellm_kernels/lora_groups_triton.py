"""The CUDA kernels of `lora_expand` for a decode step: a program reads its part of B once for all rows of an adapter.

Row by row, 32 rows of 8 adapters would read every B four times: of a Llama-3.1-8B layer 44 MB instead of 11.
"""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.lora_beside import adapter_launch
from bladellm_kernels.lora_expand_triton import blocks_of, slice_outputs, three
from bladellm_kernels.lora_tokens import TokenAdapters
from bladellm_kernels.power_of_two import power_of_two

GROUP_TOKENS, MOST_TOKENS = 16, 32
"""Rows from which on programs are for adapters, and rows that one takes at most: a side of a matrix product."""
BLOCK_N, LEAST_RANKS = 64, 16
"""Outputs of a program; ranks at least, another side."""


@triton.jit  # type: ignore[untyped-decorator]
def ranks_of_tokens(
    h: tl.tensor, token: tl.tensor, own: tl.tensor, tokens: tl.tensor, parts: tl.tensor, place: tl.tensor,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[tokens, BLOCK_R] of h, its parts added up; 0 where `own` is False. place: of the slice's first rank in a row."""
    part, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R)
    row = part[:, None] * tokens + token[None, :]
    mask = (part < parts)[:, None] & own[None, :]
    numbers = tl.load(
        h + row[:, :, None] * WIDTH + place + rank[None, None, :],
        mask=mask[:, :, None] & (rank < RANKS)[None, None, :], other=0.0,
    )  # fmt: skip
    return tl.sum(numbers, 0)


@triton.jit(do_not_specialize=["tokens", "parts"])  # type: ignore[untyped-decorator]
def expand_groups_kernel(
    h: tl.tensor, b: tl.tensor, slots: tl.tensor, y: tl.tensor, tokens: tl.tensor, parts: tl.tensor,
    rows_0: tl.tensor, rows_1: tl.tensor, rows_2: tl.tensor, b_stride: tl.tensor, y_stride: tl.tensor,
    SLICES: tl.constexpr, RANKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (block of outputs, adapter, block of tokens). B is loaded before h and y are ready."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    slot = tl.program_id(1)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.load(slots + token, mask=token < tokens, other=-1) == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        number, output, inside = slice_outputs(tl.program_id(0), rows_0, rows_1, rows_2, BLOCK_N)
        rank = tl.arange(0, BLOCK_R)
        place = b + slot.to(tl.int64) * b_stride + output[None, :] * RANKS + rank[:, None]
        weight = tl.load(place, mask=inside[None, :] & (rank < RANKS)[:, None], other=0.0)
        if READY:
            wait_for_inputs(EARLY)
        shrunk = ranks_of_tokens(h, token, own, tokens, parts, number * RANKS, SLICES * RANKS, RANKS, BLOCK_P, BLOCK_R)
        target = y + token[:, None].to(tl.int64) * y_stride + output[None, :]
        mask = own[:, None] & inside[None, :]
        before = tl.load(target, mask=mask, other=0.0)
        sums = tl.dot(shrunk.to(before.dtype), weight.to(before.dtype), before.to(tl.float32), input_precision="ieee")
        tl.store(target, sums, mask=mask)


@triton.jit(do_not_specialize=["tokens", "parts"])  # type: ignore[untyped-decorator]
def expand_silu_groups_kernel(
    h: tl.tensor, b: tl.tensor, slots: tl.tensor, y: tl.tensor, out: tl.tensor, tokens: tl.tensor, parts: tl.tensor,
    rows: tl.tensor, b_stride: tl.tensor, y_stride: tl.tensor, RANKS: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (block of gated outputs, adapter, block of tokens); the first adapter's are those without one."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    slot = tl.program_id(1) - 1
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    own = tl.load(slots + token, mask=token < tokens, other=-2) == slot
    if tl.max(own.to(tl.int32), 0) > 0:
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside, rank = output < rows, tl.arange(0, BLOCK_R)
        used = inside[None, :] & (rank < RANKS)[:, None] & (slot >= 0)
        place = b + slot.to(tl.int64) * b_stride + output[None, :] * RANKS + rank[:, None]
        gate_weight = tl.load(place, mask=used, other=0.0)
        up_weight = tl.load(place + rows * RANKS, mask=used, other=0.0)
        if READY:
            wait_for_inputs(EARLY)
        has = own & (slot >= 0)
        gate_ranks = ranks_of_tokens(h, token, has, tokens, parts, 0, 2 * RANKS, RANKS, BLOCK_P, BLOCK_R)
        up_ranks = ranks_of_tokens(h, token, has, tokens, parts, RANKS, 2 * RANKS, RANKS, BLOCK_P, BLOCK_R)
        source = y + token[:, None].to(tl.int64) * y_stride + output[None, :]
        mask = own[:, None] & inside[None, :]
        gate, up = tl.load(source, mask=mask, other=0.0), tl.load(source + rows, mask=mask, other=0.0)
        kind = gate.dtype
        gate = tl.dot(gate_ranks.to(kind), gate_weight.to(kind), gate.to(tl.float32), input_precision="ieee")
        up = tl.dot(up_ranks.to(kind), up_weight.to(kind), up.to(tl.float32), input_precision="ieee")
        target = out + token[:, None].to(tl.int64) * rows + output[None, :]
        tl.store(target, gate * tl.sigmoid(gate) * up, mask=mask)


def launch_expand_groups(
    h: torch.Tensor, b: torch.Tensor, rows: tuple[int, ...], adapters: TokenAdapters, y: torch.Tensor
) -> None:
    """As `lora_expand`, of many tokens that are not in tiles."""
    parts, tokens, _ = h.shape
    ranks, block_m = b.shape[2], min(MOST_TOKENS, power_of_two(tokens))
    expand_groups_kernel[(blocks_of(rows, BLOCK_N), len(b), -(-tokens // block_m))](
        h, b, adapters.slots, y, tokens, parts, *three(rows), b.stride(0), y.stride(0), SLICES=len(rows), RANKS=ranks,
        BLOCK_P=power_of_two(parts), BLOCK_M=block_m, BLOCK_R=max(LEAST_RANKS, power_of_two(ranks)), BLOCK_N=BLOCK_N,
        READY=adapters.ready, num_warps=4, **adapter_launch(adapters, y.device),
    )  # fmt: skip


def launch_expand_silu_groups(
    h: torch.Tensor, b: torch.Tensor, adapters: TokenAdapters, y: torch.Tensor, out: torch.Tensor
) -> None:
    """As `lora_expand_silu_mul`, of many tokens that are not in tiles, into `out`."""
    parts, tokens, _ = h.shape
    rows, ranks, block_m = b.shape[1] // 2, b.shape[2], min(MOST_TOKENS, power_of_two(tokens))
    expand_silu_groups_kernel[(-(-rows // BLOCK_N), len(b) + 1, -(-tokens // block_m))](
        h, b, adapters.slots, y, out, tokens, parts, rows, b.stride(0), y.stride(0), RANKS=ranks,
        BLOCK_P=power_of_two(parts), BLOCK_M=block_m, BLOCK_R=max(LEAST_RANKS, power_of_two(ranks)), BLOCK_N=BLOCK_N,
        READY=adapters.ready, num_warps=4, **adapter_launch(adapters, y.device),
    )  # fmt: skip
