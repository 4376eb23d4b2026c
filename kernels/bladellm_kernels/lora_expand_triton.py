"""The CUDA kernels of `lora_expand`: a program for a block of a token's outputs, or of those of a tile of tokens."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.lora_beside import adapter_launch
from bladellm_kernels.lora_tokens import FIELDS, TILE_TOKENS, AdapterTiles, TokenAdapters
from bladellm_kernels.power_of_two import power_of_two

TILE_NUMBERS, LEAST_OUTPUTS, LEAST_RANKS = 8192, 32, 16
"""Numbers of B that a program holds; outputs of it at least; ranks of a tile of tokens, a side of a matrix product."""


@triton.jit  # type: ignore[untyped-decorator]
def slice_outputs(
    block: tl.tensor, rows_0: tl.tensor, rows_1: tl.tensor, rows_2: tl.tensor, BLOCK_N: tl.constexpr
) -> tl.tuple:
    """(slice, outputs [BLOCK_N], which of these are the slice's): no block has outputs of two slices."""
    first, second = tl.cdiv(rows_0, BLOCK_N), tl.cdiv(rows_0, BLOCK_N) + tl.cdiv(rows_1, BLOCK_N)
    number = (block >= first).to(tl.int32) + (block >= second).to(tl.int32)
    before = tl.where(number == 0, 0, tl.where(number == 1, first, second))
    begin = tl.where(number == 0, 0, tl.where(number == 1, rows_0, rows_0 + rows_1))
    end = tl.where(number == 0, rows_0, tl.where(number == 1, rows_0 + rows_1, rows_0 + rows_1 + rows_2))
    output = begin + (block - before) * BLOCK_N + tl.arange(0, BLOCK_N)
    return number, output, output < end


@triton.jit(do_not_specialize=["tokens", "parts"])  # type: ignore[untyped-decorator]
def expand_rows_kernel(
    h: tl.tensor, b: tl.tensor, slots: tl.tensor, y: tl.tensor, tokens: tl.tensor, parts: tl.tensor,
    rows_0: tl.tensor, rows_1: tl.tensor, rows_2: tl.tensor, b_stride: tl.tensor, y_stride: tl.tensor,
    SLICES: tl.constexpr, RANKS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    READY: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, block of outputs). B is loaded before h and y are ready."""
    let_next_start(EARLY)
    if not READY:
        wait_for_inputs(EARLY)
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    number, output, inside = slice_outputs(tl.program_id(1), rows_0, rows_1, rows_2, BLOCK_N)
    part, rank = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R)
    inside = inside & (slot >= 0)
    used = (rank < RANKS) & (slot >= 0)
    place = b + slot * b_stride + output[:, None] * RANKS + rank[None, :]
    weight = tl.load(place, mask=inside[:, None] & used[None, :], other=0.0)
    if READY:
        wait_for_inputs(EARLY)
    place = h + (part * tokens + token)[:, None] * (SLICES * RANKS) + number * RANKS + rank[None, :]
    shrunk = tl.sum(tl.load(place, mask=(part < parts)[:, None] & used[None, :], other=0.0), 0)
    sums = tl.sum(weight.to(tl.float32) * shrunk[None, :], 1)
    target = y + token.to(tl.int64) * y_stride + output
    total = tl.load(target, mask=inside, other=0.0).to(tl.float32) + sums
    tl.store(target, total, mask=inside)


@triton.jit(do_not_specialize=["tokens", "parts"])  # type: ignore[untyped-decorator]
def expand_tiles_kernel(
    h: tl.tensor, b: tl.tensor, order: tl.tensor, tiles: tl.tensor, y: tl.tensor, tokens: tl.tensor,
    parts: tl.tensor, rows_0: tl.tensor, rows_1: tl.tensor, rows_2: tl.tensor, b_stride: tl.tensor,
    y_stride: tl.tensor, FIELDS: tl.constexpr, SLICES: tl.constexpr, RANKS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tile, block of outputs)."""
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * FIELDS).to(tl.int64)
    first, count = tl.load(tiles + tile * FIELDS + 1), tl.load(tiles + tile * FIELDS + 2)
    if count > 0:
        number, output, inside = slice_outputs(tl.program_id(1), rows_0, rows_1, rows_2, BLOCK_N)
        lane, rank = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
        present = lane < count
        token = tl.load(order + first + lane, mask=present, other=0).to(tl.int64)
        place = h + token[:, None] * (SLICES * RANKS) + number * RANKS + rank[None, :]
        shrunk = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
        for _part in tl.range(0, parts):
            shrunk += tl.load(place, mask=present[:, None] & (rank < RANKS)[None, :], other=0.0)
            place += tokens * (SLICES * RANKS)
        place = b + slot * b_stride + output[None, :] * RANKS + rank[:, None]
        weight = tl.load(place, mask=(rank < RANKS)[:, None] & inside[None, :], other=0.0)
        target = y + token[:, None] * y_stride + output[None, :]
        mask = present[:, None] & inside[None, :]
        before = tl.load(target, mask=mask, other=0.0)
        sums = tl.dot(shrunk.to(before.dtype), weight.to(before.dtype), before.to(tl.float32), input_precision="ieee")
        tl.store(target, sums, mask=mask)


def launch_expand(
    h: torch.Tensor, b: torch.Tensor, rows: tuple[int, ...], adapters: TokenAdapters, y: torch.Tensor
) -> None:
    """As `lora_expand`."""
    if adapters.tiles is not None:
        _launch_tiles(h, b, rows, adapters.tiles, y)
        return
    parts, tokens, _ = h.shape
    ranks = b.shape[2]
    block_r = power_of_two(ranks)
    block_n = max(LEAST_OUTPUTS, TILE_NUMBERS // block_r)
    if tokens:
        expand_rows_kernel[(tokens, blocks_of(rows, block_n))](
            h, b, adapters.slots, y, tokens, parts, *three(rows), b.stride(0), y.stride(0), SLICES=len(rows),
            RANKS=ranks, BLOCK_P=power_of_two(parts), BLOCK_R=block_r, BLOCK_N=block_n, READY=adapters.ready,
            num_warps=4, **adapter_launch(adapters, y.device),
        )  # fmt: skip


def _launch_tiles(
    h: torch.Tensor, b: torch.Tensor, rows: tuple[int, ...], tiles: AdapterTiles, y: torch.Tensor
) -> None:
    parts, tokens, _ = h.shape
    ranks = b.shape[2]
    block_r = max(LEAST_RANKS, power_of_two(ranks))
    block_n = min(128, max(LEAST_OUTPUTS, TILE_NUMBERS // block_r))
    if len(tiles.tiles):
        expand_tiles_kernel[(len(tiles.tiles), blocks_of(rows, block_n))](
            h, b, tiles.order, tiles.tiles, y, tokens, parts, *three(rows), b.stride(0), y.stride(0), FIELDS=FIELDS,
            SLICES=len(rows), RANKS=ranks, BLOCK_M=TILE_TOKENS, BLOCK_R=block_r, BLOCK_N=block_n, num_warps=4,
            **early_launch(y.device),
        )  # fmt: skip


def three(rows: tuple[int, ...]) -> tuple[int, int, int]:
    """Outputs of the first three slices, 0 where there are fewer."""
    first, second, third, *_ = (*rows, 0, 0)
    return first, second, third


def blocks_of(rows: tuple[int, ...], block_n: int) -> int:
    """Blocks of outputs, none of which has outputs of two slices."""
    return sum(-(-count // block_n) for count in rows)
