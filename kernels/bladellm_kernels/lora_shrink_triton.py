"""The CUDA kernels of `lora_shrink`: a program for a token's part of the inputs, or for a tile of tokens."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.lora_beside import adapter_launch, beside
from bladellm_kernels.lora_tokens import FIELDS, TILE_PARTS, TILE_TOKENS, AdapterTiles, TokenAdapters
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.power_of_two import power_of_two

TILE_NUMBERS, LEAST_BLOCK_K, MOST_PARTS = 8192, 128, 32
"""Numbers of A that a program holds at once; columns of it at least; parts that the inputs are divided into at most."""
TILE_BYTES, LEAST_RANKS = 256, 16
"""Of tiles of tokens: bytes of x that a program takes of a token at once, and ranks at least, which are a side of a
matrix product."""


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def shrink_rows_kernel(
    x: tl.tensor, a: tl.tensor, scales: tl.tensor, slots: tl.tensor, out: tl.tensor, tokens: tl.tensor,
    inputs: tl.tensor, x_stride: tl.tensor, a_stride: tl.tensor, scale_stride: tl.tensor, SLICES: tl.constexpr,
    RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, STEPS: tl.constexpr, READY: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, part, slice): STEPS blocks of the inputs. The first of A is loaded before x is ready."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    token, part, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + token).to(tl.int64)
    rank = tl.arange(0, BLOCK_R)
    row = number * RANKS + rank
    column = part * STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
    place = a + slot * a_stride + row[:, None] * inputs
    used = (rank < RANKS) & (slot >= 0)
    weight = tl.load(place + column[None, :], mask=used[:, None] & (column < inputs)[None, :], other=0.0)
    scale = tl.load(scales + slot * scale_stride + number, mask=slot >= 0, other=0.0)
    if READY:
        wait_for_inputs(EARLY)
    x += token.to(tl.int64) * x_stride
    numbers = tl.load(x + column, mask=(column < inputs) & (slot >= 0), other=0.0)
    sums = tl.sum(weight.to(tl.float32) * numbers.to(tl.float32)[None, :], 1)
    for _step in tl.static_range(STEPS - 1):
        column += BLOCK_K
        weight = tl.load(place + column[None, :], mask=used[:, None] & (column < inputs)[None, :], other=0.0)
        numbers = tl.load(x + column, mask=(column < inputs) & (slot >= 0), other=0.0)
        sums += tl.sum(weight.to(tl.float32) * numbers.to(tl.float32)[None, :], 1)
    target = out + (part * tokens + token).to(tl.int64) * (SLICES * RANKS)
    tl.store(target + row, sums * scale, mask=used)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def shrink_tiles_kernel(
    x: tl.tensor, a: tl.tensor, scales: tl.tensor, order: tl.tensor, tiles: tl.tensor, out: tl.tensor,
    tokens: tl.tensor, inputs: tl.tensor, length: tl.tensor, x_stride: tl.tensor, a_stride: tl.tensor,
    scale_stride: tl.tensor, FIELDS: tl.constexpr, SLICES: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile, part, slice): `length` of the inputs of the tile's tokens."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    tile, part, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles + tile * FIELDS).to(tl.int64)
    first, count = tl.load(tiles + tile * FIELDS + 1), tl.load(tiles + tile * FIELDS + 2)
    if count > 0:
        lane, rank = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        token = tl.load(order + first + lane, mask=lane < count, other=0).to(tl.int64)
        row = number * RANKS + rank
        sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        end = tl.minimum(inputs, (part + 1) * length)
        for start in tl.range(part * length, end, BLOCK_K):
            column = start + tl.arange(0, BLOCK_K)
            inside = column < end
            place = x + token[:, None] * x_stride + column[None, :]
            numbers = tl.load(place, mask=(lane < count)[:, None] & inside[None, :], other=0.0)
            place = a + slot * a_stride + row[None, :] * inputs + column[:, None]
            weight = tl.load(place, mask=inside[:, None] & (rank < RANKS)[None, :], other=0.0)
            sums = tl.dot(numbers, weight.to(numbers.dtype), sums, input_precision="ieee")
        sums *= tl.load(scales + slot * scale_stride + number)
        target = out + (part * tokens + token)[:, None] * (SLICES * RANKS) + row[None, :]
        tl.store(target, sums, mask=(lane < count)[:, None] & (rank < RANKS)[None, :])


def launch_shrink(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, adapters: TokenAdapters) -> torch.Tensor:
    """As `lora_shrink`."""
    if adapters.tiles is not None:
        return _launch_tiles(x, a, scales, adapters.tiles)
    tokens, inputs = x.shape
    slices = scales.shape[1]
    ranks = a.shape[1] // slices
    block_r = power_of_two(ranks)
    block_k = min(max(LEAST_BLOCK_K, TILE_NUMBERS // block_r), power_of_two(inputs))
    blocks = -(-inputs // block_k)
    steps = -(-blocks // MOST_PARTS)
    parts = -(-blocks // steps)
    out = torch.empty(parts, tokens, a.shape[1], dtype=torch.float32, device=x.device)
    if tokens:
        with beside(adapters):
            shrink_rows_kernel[(tokens, parts, slices)](
                x, a, scales, adapters.slots, out, tokens, inputs, x.stride(0), a.stride(0), scales.stride(0),
                SLICES=slices, RANKS=ranks, BLOCK_R=block_r, BLOCK_K=block_k, STEPS=steps, READY=adapters.ready,
                num_warps=4, **adapter_launch(adapters, x.device),
            )  # fmt: skip
    return out


def _launch_tiles(x: torch.Tensor, a: torch.Tensor, scales: torch.Tensor, tiles: AdapterTiles) -> torch.Tensor:
    tokens, inputs = x.shape
    slices, count = scales.shape[1], len(tiles.tiles)
    ranks = a.shape[1] // slices
    block_k = TILE_BYTES // x.element_size()
    blocks = -(-inputs // block_k)
    wanted = min(TILE_PARTS, blocks, max(1, 2 * multiprocessors(x.device) // max(1, count * slices)))
    length = -(-blocks // wanted) * block_k
    parts = -(-inputs // length)
    out = torch.empty(parts, tokens, a.shape[1], dtype=torch.float32, device=x.device)
    if count:
        shrink_tiles_kernel[(count, parts, slices)](
            x, a, scales, tiles.order, tiles.tiles, out, tokens, inputs, length, x.stride(0), a.stride(0),
            scales.stride(0), FIELDS=FIELDS, SLICES=slices, RANKS=ranks, BLOCK_M=TILE_TOKENS,
            BLOCK_R=max(LEAST_RANKS, power_of_two(ranks)), BLOCK_K=block_k, num_warps=4,
            **early_launch(x.device),
        )  # fmt: skip
    return out
