"""The CUDA kernels of `ragged_prefill_attention`: all chunks in one launch, after FlashAttention-2 (arXiv:2307.08691).

A program takes a tile of a chunk's queries in one KV head. The query heads that share the KV head are packed as rows
of the tile (row r is token r // group, head r % group), so a tile reads its keys and values once for all of them.
"""

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.kv_codes_triton import float12_number
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_merge_tiles import merge_tiles_kernel
from bladellm_kernels.prefill_tiles import (
    ITEM_FIELDS,
    MERGE_FIELDS,
    PrefillTiles,
    Span,
    TileShape,
    tile_shape,
    tiles_on_device,
)


class Shape(NamedTuple):
    """What a kernel is compiled for. block_d: head_dim rounded up to a power of two; rows, keys: those of a tile; bits:
    of a code."""

    kv_heads: int
    group: int
    head_dim: int
    block_d: int
    rows: int
    keys: int
    planes: int
    bits: int
    offset: float
    paged: bool
    window: bool
    precision: str


class Memory(NamedTuple):
    """The KV layer as the kernel sees it: its tensors (any in place of one it lacks) and their strides."""

    payload: torch.Tensor
    row_stride: int
    kv_stride: int
    head_stride: int
    scales: torch.Tensor
    scale_granule_stride: int
    scale_head_stride: int
    scale_kv_stride: int
    plane_stride: int
    table: torch.Tensor
    slot_stride: int
    granule_tokens: int


class Rows(NamedTuple):
    """Queries or outputs [T, Hq, D], elements of a head contiguous."""

    data: torch.Tensor
    token_stride: int
    head_stride: int


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(
    pointer: tl.tensor,
    offsets: tl.tensor,
    inside: tl.tensor,
    scales: tl.tensor,
    scale_offsets: tl.tensor,
    plane_stride: tl.tensor,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Stored rows at `offsets` as numbers of DTYPE, [keys, block_d]; what is not `inside` is not read, and zero."""
    dim = tl.arange(0, SHAPE.block_d)
    shared_byte = dim % (SHAPE.head_dim // 2)
    places = pointer + offsets[:, None]
    stored = _load_elements(places, shared_byte if SHAPE.bits == 4 else dim, dim, inside, SHAPE, MASKED)
    if SHAPE.planes > 0:
        nibble = tl.where(dim < SHAPE.head_dim // 2, 0, 4)[None, :].to(tl.uint8)
        if SHAPE.bits == 4:
            stored = (stored >> nibble) & 15
        elif SHAPE.bits == 12:
            upper = _load_elements(places, SHAPE.head_dim + shared_byte, dim, inside, SHAPE, MASKED)
            stored = float12_number(stored.to(tl.int32) | ((upper >> nibble) & 15).to(tl.int32) << 8)
        scale = tl.load(scales + scale_offsets, mask=inside, other=0.0).to(tl.float32)
        numbers = (stored.to(tl.float32) - SHAPE.offset) * scale[:, None]
        if SHAPE.planes > 1:
            zero = tl.load(scales + plane_stride + scale_offsets, mask=inside, other=0.0).to(tl.float32)
            numbers += zero[:, None]
        stored = numbers.to(DTYPE)
    return stored


@triton.jit  # type: ignore[untyped-decorator]
def _load_elements(
    rows: tl.tensor,
    place: tl.tensor,
    dim: tl.tensor,
    inside: tl.tensor,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tl.tensor:
    """Elements at `place` of rows, [keys, block_d]; place, dim: [block_d]."""
    if MASKED or SHAPE.head_dim < SHAPE.block_d:
        elements = tl.load(rows + place[None, :], mask=inside[:, None] & (dim < SHAPE.head_dim)[None, :], other=0.0)
    else:
        elements = tl.load(rows + place[None, :])
    return elements


@triton.jit  # type: ignore[untyped-decorator]
def _attend(
    acc: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    key_first: tl.tensor,
    key_last: tl.tensor,
    key_end: tl.tensor,
    payload: tl.tensor,
    scales: tl.tensor,
    granules: tl.tensor,
    memory: tl.tensor,
    qk_scale: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to the tiles of keys that begin in [key_first, key_last); no key from key_end on is touched."""
    column = tl.arange(0, SHAPE.keys)
    long_row_stride = tl.cast(memory.row_stride, tl.int64)
    offsets = column * (long_row_stride if SHAPE.paged else memory.row_stride)
    scale_offsets, tile = column.to(tl.int64), payload
    for key0 in range(key_first, key_last, SHAPE.keys):
        key = key0 + column
        inside = key < key_end
        if SHAPE.paged or SHAPE.planes > 0:
            granule = tl.load(granules + key // memory.granule_tokens, mask=inside, other=0).to(tl.int64)
            place = key % memory.granule_tokens
            scale_offsets = granule * memory.scale_granule_stride + place
        if SHAPE.paged:
            offsets = (granule * memory.granule_tokens + place) * long_row_stride
        else:
            tile = payload + key0 * long_row_stride
        k = load_tile(tile, offsets, inside, scales, scale_offsets, memory.plane_stride, SHAPE, MASKED, q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=SHAPE.precision)
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & inside[None, :]
            if SHAPE.window:
                visible &= key[None, :] > position[:, None] - window
            scores = tl.where(visible, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1) * qk_scale)
        level = higher
        if MASKED:
            # A row that sees nothing yet has no finite peak, and -inf - -inf is not a number.
            level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores * qk_scale - level[:, None])
        fade = tl.exp2(peak - level)
        total = total * fade + tl.sum(weights, 1)
        peak = higher
        v = load_tile(
            tile + memory.kv_stride, offsets, inside, scales + memory.scale_kv_stride, scale_offsets,
            memory.plane_stride, SHAPE, MASKED, q.dtype,
        )  # fmt: skip
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision=SHAPE.precision)
    return acc, total, peak


@triton.jit  # type: ignore[untyped-decorator]
def _attend_range(
    q: tl.tensor,
    position: tl.tensor,
    lowest: tl.tensor,
    highest: tl.tensor,
    key_first: tl.tensor,
    key_end: tl.tensor,
    payload: tl.tensor,
    scales: tl.tensor,
    granules: tl.tensor,
    memory: tl.tensor,
    qk_scale: tl.tensor,
    window: tl.tensor,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attend to keys [key_first, key_end) with queries at positions from `lowest` to `highest`.

    Some row does not see some key of [key_first, left) and of [right, key_end); between them every row sees every key.
    """
    ROWS: tl.constexpr = SHAPE.rows
    BLOCK_D: tl.constexpr = SHAPE.block_d
    left = key_first
    if SHAPE.window:
        left += tl.cdiv(tl.maximum(highest - window + 1 - key_first, 0), SHAPE.keys) * SHAPE.keys
    right = left + tl.maximum(tl.minimum(lowest + 1, key_end) - left, 0) // SHAPE.keys * SHAPE.keys
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    if SHAPE.window:
        acc, total, peak = _attend(
            acc, total, peak, q, position, key_first, tl.minimum(left, key_end), key_end,
            payload, scales, granules, memory, qk_scale, window, SHAPE, True,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, position, left, right, key_end,
        payload, scales, granules, memory, qk_scale, window, SHAPE, False,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, position, right, key_end, key_end,
        payload, scales, granules, memory, qk_scale, window, SHAPE, True,
    )  # fmt: skip
    return acc, total, peak


@triton.jit(do_not_specialize=["window"])  # type: ignore[untyped-decorator]
def ragged_prefill_kernel(
    q: tl.tensor,
    out: tl.tensor,
    memory: tl.tensor,
    items: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    qk_scale: tl.tensor,
    window: tl.tensor,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One program an item and KV head. items: int64 [I, FIELDS], see `prefill_tiles.list_tiles`, those of query_len 0
    left out; qk_scale holds log2 e.

    partial: float32 [P · kv_heads, rows, block_d] and partial_lse, base 2, for items that see a part of their keys.
    """
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    head = tl.program_id(0) % SHAPE.kv_heads
    item = items + (tl.program_id(0) // SHAPE.kv_heads) * FIELDS
    first_row = tl.load(item).to(tl.int32)
    first_token = tl.load(item + 1)
    query_len = tl.load(item + 2).to(tl.int32)
    if query_len == 0:
        return
    start = tl.load(item + 3).to(tl.int32)
    row = first_row + tl.arange(0, SHAPE.rows)
    token = row // SHAPE.group
    query_head = head * SHAPE.group + row % SHAPE.group
    dim = tl.arange(0, SHAPE.block_d)
    real = (token < query_len)[:, None] & (dim < SHAPE.head_dim)[None, :]
    places = (first_token + token) * q.token_stride + query_head * q.head_stride
    q_tile = tl.load(q.data + places[:, None] + dim[None, :], mask=real, other=0.0)
    position = start + token
    payload = memory.payload + head.to(tl.int64) * memory.head_stride
    if not SHAPE.paged:
        payload += tl.load(item + 4) * memory.row_stride
    scales = memory.scales + head.to(tl.int64) * memory.scale_head_stride
    granules = memory.table + tl.load(item + 5) * memory.slot_stride
    highest = start + tl.minimum(query_len - 1, (first_row + SHAPE.rows - 1) // SHAPE.group)
    acc, total, peak = _attend_range(
        q_tile, position, start + first_row // SHAPE.group, highest, tl.load(item + 6).to(tl.int32),
        tl.load(item + 7).to(tl.int32), payload, scales, granules, memory, qk_scale, window, SHAPE,
    )  # fmt: skip
    part = tl.load(item + 8)
    _store_tile(acc, total, peak, out, partial, partial_lse, part, head, first_token + token, query_head, real, SHAPE)


@triton.jit  # type: ignore[untyped-decorator]
def _store_tile(
    acc: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    part: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    query_head: tl.tensor,
    real: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Write a tile to `out` where it is the only part (part < 0), to `partial` and `partial_lse` otherwise."""
    dim = tl.arange(0, SHAPE.block_d)
    attended = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if part < 0:
        places = token * out.token_stride + query_head * out.head_stride
        tl.store(out.data + places[:, None] + dim[None, :], attended.to(out.data.dtype.element_ty), mask=real)
    else:
        line = (part * SHAPE.kv_heads + head) * SHAPE.rows + tl.arange(0, SHAPE.rows)
        tl.store(partial + line[:, None] * SHAPE.block_d + dim[None, :], attended)
        tl.store(partial_lse + line, peak + tl.log2(total))


def launch(
    q: torch.Tensor,
    kv: KvLayer,
    spans: Sequence[Span],
    scale: float,
    window: int | None,
    out: torch.Tensor,
    tile: TileShape | None = None,
) -> None:
    """`ragged_prefill_attention` by one kernel, and a merge where keys are divided; the arguments have been checked."""
    group = q.shape[1] // kv.kv_heads
    if tile is None:
        longest = max(span.query_len for span in spans)
        tile = tile_shape(kv.head_dim, q.dtype, kv.format.quantized, longest * group)
    stream = torch.cuda.current_stream(q.device).cuda_stream if q.is_cuda else 0
    tiles = tiles_on_device(tuple(spans), group, kv.kv_heads, window, tile.rows, q.device, stream)
    launch_tiles(q, kv, tiles, tile, scale, window, out, len(tiles.merges) > 0)


def compile_ahead(q: torch.Tensor, kv: KvLayer, window: int | None) -> None:
    """Compile and load what launches on such tensors need, by launches of no programs.

    q: [0, Hq, D]. Quantized layers are attended to on their codes and on numbers made of them.
    """
    numbers = torch.empty(0, 2, kv.kv_heads, kv.head_dim, dtype=q.dtype, device=q.device)
    kinds = [kv, KvLayer(numbers, NO_QUANT, kv.granule_tokens)] if kv.format.quantized else [kv]
    fields = torch.empty(0, ITEM_FIELDS, dtype=torch.int64, device=q.device)
    tiles = PrefillTiles(fields, fields, 0)
    for kind, rows in product(kinds, (1, 1 << 20)):
        tile = tile_shape(kv.head_dim, q.dtype, kind.format.quantized, rows)
        launch_tiles(q, kind, tiles, tile, 1.0, window, q, True)


def launch_tiles(
    q: torch.Tensor,
    kv: KvLayer,
    tiles: PrefillTiles,
    tile: TileShape,
    scale: float,
    window: int | None,
    out: torch.Tensor,
    merged: bool,
) -> None:
    """A work list in tiles of that shape; merged: whether any of its merges are to be done."""
    shape = kernel_shape(kv, q.shape[1] // kv.kv_heads, tile, window is not None, q.dtype)
    lines = max(1, tiles.parts * kv.kv_heads * tile.rows)
    partial = torch.empty(lines, shape.block_d, dtype=torch.float32, device=q.device)
    partial_lse = torch.empty(lines, dtype=torch.float32, device=q.device)
    target, early = Rows(out, out.stride(0), out.stride(1)), early_launch(q.device)
    ragged_prefill_kernel[(len(tiles.items) * kv.kv_heads,)](
        Rows(q, q.stride(0), q.stride(1)), target, kernel_memory(kv), tiles.items, partial, partial_lse,
        scale * math.log2(math.e), window or 0,
        FIELDS=ITEM_FIELDS, SHAPE=shape, num_warps=tile.warps, num_stages=tile.stages, **early,
    )  # fmt: skip
    if merged:
        merge_tiles_kernel[(len(tiles.merges) * kv.kv_heads,)](
            target, tiles.merges, partial, partial_lse, FIELDS=MERGE_FIELDS, SHAPE=shape, num_warps=8, **early
        )


def kernel_shape(kv: KvLayer, group: int, tile: TileShape, window: bool, dtype: torch.dtype) -> Shape:
    block_d = max(16, triton.next_power_of_2(kv.head_dim))
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return Shape(
        kv.kv_heads, group, kv.head_dim, block_d, tile.rows, tile.keys,
        kv.format.planes, kv.format.bits, kv.format.offset, kv.paged, window, precision,
    )  # fmt: skip


def kernel_memory(kv: KvLayer) -> Memory:
    scales = kv.payload if kv.scales is None else kv.scales
    table = kv.payload if kv.table is None else kv.table
    granule, head, key_value, plane = (0,) * 4 if kv.scales is None else kv.scales.stride()[:4]
    row_stride, kv_stride, head_stride, _ = kv.payload.stride()
    return Memory(
        kv.payload, row_stride, kv_stride, head_stride, scales, granule, head, key_value, plane,
        table, 0 if kv.table is None else kv.table.stride(0), kv.granule_tokens,
    )  # fmt: skip
