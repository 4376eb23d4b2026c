"""The tensor core kernel of `linear`, for up to 256 rows of x, which is bound by reading the weight.

The product is computed transposed: outputs are the rows of a tile, so that few rows of x fill a tensor core
instruction. All tiles of the weight, numbered along K and then along N, are divided evenly among the programs
("stream-K", Osama et al. 2023, arXiv:2301.03598). Where a block of outputs is divided, its programs leave float32
partial sums, and the one that comes last adds them in the order of K: the bits do not depend on which it was.
"""

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

UNROLLED = tl.constexpr(16384)
"""Partial sums that are asked for at once; of larger tiles registers hold one segment's."""


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def linear_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor | None,
    residual: tl.tensor | None,
    out: tl.tensor,
    partial: tl.tensor,
    counters: tl.tensor,
    rows: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    x_stride: tl.tensor,
    weight_stride: tl.tensor,
    residual_stride: tl.tensor,
    out_stride: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PREFETCH: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Program p takes tiles [p · T / P, (p + 1) · T / P) of T. PARTS is 2 where the weight is a gate-up projection of
    2 · outputs rows. EVEN: BLOCK_K divides inputs. PREFETCH: tiles."""
    let_next_start(EARLY)
    row = tl.arange(0, BLOCK_M)
    length = tl.cdiv(inputs, BLOCK_K)
    total = tl.cdiv(outputs, BLOCK_N) * length
    tile, end = _first_tile(tl.program_id(0), total), _first_tile(tl.program_id(0) + 1, total)
    if EARLY and PREFETCH > 0:
        prefetch_weight(weight, weight_stride, outputs, inputs, tile, end, BLOCK_N, BLOCK_K, PREFETCH, PARTS)
    wait_for_inputs(EARLY)
    while tile < end:
        block = tile // length
        first = tile - block * length
        stop = tl.minimum(length, first + end - tile)
        sums = _zeros(BLOCK_M, BLOCK_N, PARTS)
        for step in tl.range(first, stop, num_stages=STAGES):
            column = step * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = (row < rows)[:, None] if EVEN else (row < rows)[:, None] & (column < inputs)[None, :]
            numbers = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            sums = _add_products(
                sums, weight, weight_stride, outputs, inputs, block, column, numbers, BLOCK_N, EVEN, PARTS, UPCAST
            )
        last = True
        if SEGMENTS > 1:
            sums, last = _join_segments(
                sums, partial, counters, block, length, total, BLOCK_M, BLOCK_N, SEGMENTS, PARTS
            )
        if last:
            values = apply_gate(sums, bias, block, outputs, BLOCK_N, PARTS)
            store_outputs(
                values, residual, out, block_outputs(block, BLOCK_N)[:, None], row[None, :], rows, outputs,
                residual_stride, out_stride,
            )  # fmt: skip
        tile += stop - first


@triton.jit  # type: ignore[untyped-decorator]
def _zeros(BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr) -> tl.tuple:
    sums: tl.tuple = ()
    for _part in tl.static_range(PARTS):
        sums += (tl.full((BLOCK_N, BLOCK_M), 0.0, tl.float32),)
    return sums


@triton.jit  # type: ignore[untyped-decorator]
def _first_tile(program: tl.tensor, total: tl.tensor) -> tl.tensor:
    return program * total // tl.num_programs(0)


@triton.jit  # type: ignore[untyped-decorator]
def _owner(tile: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The program that takes a tile."""
    return ((tile + 1) * tl.num_programs(0) - 1) // total


@triton.jit  # type: ignore[untyped-decorator]
def _add_products(
    sums: tl.tuple,
    weight: tl.tensor,
    weight_stride: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    block: tl.tensor,
    column: tl.tensor,
    numbers: tl.tensor,
    BLOCK_N: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    UPCAST: tl.constexpr,
) -> tl.tuple:
    added: tl.tuple = ()
    for part in tl.static_range(PARTS):
        tile = load_weight(weight, weight_stride, outputs, inputs, block, column, part, BLOCK_N, EVEN)
        if UPCAST:
            added += (tl.dot(tile.to(tl.float32), numbers.to(tl.float32).T, sums[part], input_precision="ieee"),)
        else:
            added += (tl.dot(tile, numbers.T, sums[part]),)
    return added


@triton.jit  # type: ignore[untyped-decorator]
def _join_segments(
    sums: tl.tuple,
    partial: tl.tensor,
    counters: tl.tensor,
    block: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """The sums over the whole of K, and whether this program has them.

    A program has at most two partial blocks, the first and the last of its range, and so two slots. counters are 0
    before and after: the last program to come takes its block's back.
    """
    lowest = _owner(block * length, total)
    segments = _owner(block * length + length - 1, total) - lowest + 1
    last = segments == 1
    if segments > 1:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        slot = _slot(tl.program_id(0), block, length, total)
        for part in tl.static_range(PARTS):
            tl.store(partial + (slot * PARTS + part) * SIZE + place, sums[part])
        # All threads' sums are written before the one that counts says so.
        tl.debug_barrier()
        last = tl.atomic_add(counters + block, 1, sem="acq_rel") == segments - 1
        if last:
            tl.store(counters + block, 0)
            sums = _added_segments(partial + place, lowest, segments, block, length, total, SIZE, SEGMENTS, PARTS)
    return sums, last


@triton.jit  # type: ignore[untyped-decorator]
def _slot(program: tl.tensor, block: tl.tensor, length: tl.tensor, total: tl.tensor) -> tl.tensor:
    return program * 2 + (_first_tile(program, total) // length != block).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _added_segments(
    partial: tl.tensor,
    lowest: tl.tensor,
    segments: tl.tensor,
    block: tl.tensor,
    length: tl.tensor,
    total: tl.tensor,
    SIZE: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr,
) -> tl.tuple:
    """Sums of all segments, in their order; read past the L1 cache, which does not see what others write."""
    added: tl.tuple = ()
    for part in tl.static_range(PARTS):
        whole = tl.full(partial.shape, 0.0, tl.float32)
        if SEGMENTS * SIZE <= UNROLLED:
            for segment in tl.static_range(SEGMENTS):
                place = partial + (_slot(lowest + segment, block, length, total) * PARTS + part) * SIZE
                whole += tl.load(place, mask=segment < segments, other=0.0, cache_modifier=".cg")
        else:
            for segment in range(segments):
                place = partial + (_slot(lowest + segment, block, length, total) * PARTS + part) * SIZE
                whole += tl.load(place, cache_modifier=".cg")
        added += (whole,)
    return added
