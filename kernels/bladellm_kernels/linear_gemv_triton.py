"""The kernel of `linear` for one to four rows of x: products in float32, and no program waits for another."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs
from bladellm_kernels.linear_tile_triton import (
    apply_gate,
    block_outputs,
    load_weight,
    prefetch_weight,
    store_outputs,
)

VECTOR = tl.constexpr(8)
"""16-bit numbers that a thread loads at once: their products are added before they meet those of other threads."""


@triton.jit  # type: ignore[untyped-decorator]
def gemv_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    residual: tl.tensor | None,
    out: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program p computes outputs [p · BLOCK_N, (p + 1) · BLOCK_N) of all ROWS rows of x.

    The first tile of the weight is loaded before the inputs are ready, and each one while the one before is multiplied.
    """
    let_next_start(EARLY)
    block = tl.program_id(0)
    column = tl.arange(0, BLOCK_K)
    tiles = _load_parts(weight, weight_stride, outputs, inputs, block, column, BLOCK_N, EVEN, PARTS)
    if EARLY and PREFETCH > 0:
        length = tl.cdiv(inputs, BLOCK_K)
        first, end = block * length + 1, (block + 1) * length
        prefetch_weight(weight, weight_stride, outputs, inputs, first, end, BLOCK_N, BLOCK_K, PREFETCH, PARTS)
    wait_for_inputs(EARLY)
    sums: tl.tuple = ()
    for _sum in tl.static_range(ROWS * PARTS):
        sums += (tl.full((BLOCK_N, BLOCK_K // VECTOR), 0.0, tl.float32),)
    for _start in tl.range(0, inputs - BLOCK_K, BLOCK_K):
        following = _load_parts(weight, weight_stride, outputs, inputs, block, column + BLOCK_K, BLOCK_N, EVEN, PARTS)
        sums = _add_products(sums, tiles, x, x_stride, column, inputs, ROWS, BLOCK_N, BLOCK_K, True, PARTS)
        tiles = following
        column += BLOCK_K
    sums = _add_products(sums, tiles, x, x_stride, column, inputs, ROWS, BLOCK_N, BLOCK_K, EVEN, PARTS)
    for row in tl.static_range(ROWS):
        wholes: tl.tuple = ()
        for part in tl.static_range(PARTS):
            wholes += (tl.sum(sums[row * PARTS + part], 1),)
        values = apply_gate(wholes, bias, block, outputs, BLOCK_N, PARTS)
        store_outputs(
            values, residual, out, block_outputs(block, BLOCK_N), row, ROWS, outputs, residual_stride, out_stride
        )


@triton.jit  # type: ignore[untyped-decorator]
def _load_parts(
    weight: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    block: tl.tensor,
    column: tl.tensor,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    tiles: tl.tuple = ()
    for part in tl.static_range(PARTS):
        tiles += (load_weight(weight, weight_stride, outputs, inputs, block, column, part, BLOCK_N, EVEN),)
    return tiles


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(
    sums: tl.tuple,
    tiles: tl.tuple,
    x: tl.tensor,
    x_stride: tl.tensor,
    column: tl.tensor,
    inputs: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    added: tl.tuple = ()
    for row in tl.static_range(ROWS):
        # [1, BLOCK_K] and not [BLOCK_K]: so each thread loads the numbers that its part of the weight meets.
        place = x + row * x_stride + column[None, :]
        if EVEN:
            numbers = tl.load(place)
        else:
            numbers = tl.load(place, mask=column[None, :] < inputs, other=0.0)
        for part in tl.static_range(PARTS):
            products = tiles[part].to(tl.float32) * numbers.to(tl.float32)
            products = tl.reshape(products, (BLOCK_N, BLOCK_K // VECTOR, VECTOR))
            added += (sums[row * PARTS + part] + tl.sum(products, 2),)
    return added
