"""Read blocks of stored keys and values inside the decode kernel: payload, scales, and the table of granules."""

from typing import Any, NamedTuple

import triton
import triton.language as tl


class KvArguments(NamedTuple):
    """A `KvLayer` as kernel arguments.

    payload in units (see `kv_codes_triton.py`), its strides in steps of `DecodeShape.step` units. Scales and table are
    contiguous in their last dimension; their other strides are in elements.
    """

    payload: Any
    row_stride: Any
    head_stride: Any
    value_stride: Any
    scales: Any
    scale_granule_stride: Any
    scale_head_stride: Any
    scale_value_stride: Any
    scale_plane_stride: Any
    table: Any
    table_stride: Any


class Span(NamedTuple):
    """Where a program reads: a sequence's slot and row of position 0, its positions [lowest, kv_len), a KV head."""

    slot: Any
    base_row: Any
    lowest: Any
    kv_len: Any
    head: Any


@triton.jit  # type: ignore[untyped-decorator]
def block_tokens(SHAPE: tl.constexpr) -> tl.tensor:
    """Positions in a block, [warps, tokens].

    Of every 16, first the even ones: a thread's rows of a tensor core tile lie 8 apart, and so share a word of scales.
    """
    row = tl.arange(0, SHAPE.tokens)
    token = row // 16 * 16 + row % 8 * 2 + row // 8 % 2
    return tl.arange(0, SHAPE.warps)[:, None] * SHAPE.tokens + token[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def inside_span(token: tl.tensor, position: tl.tensor, span: tl.tuple, SHAPE: tl.constexpr) -> tl.tensor:
    """Whether tokens of the block at `position` lie in the span."""
    inside = token < span.kv_len - position
    if SHAPE.windowed:
        inside &= token >= span.lowest - position
    return inside


@triton.jit  # type: ignore[untyped-decorator]
def is_whole(span: tl.tuple, SHAPE: tl.constexpr) -> tl.tensor:
    """Whether the blocks of a span are all that its queries see."""
    whole = span.kv_len >= 0
    if SHAPE.reads == "own":
        whole = span.lowest == 0
    elif SHAPE.reads == "shared":
        whole = span.kv_len < 0
    return whole


@triton.jit  # type: ignore[untyped-decorator]
def block_granule(kv: tl.tuple, span: tl.tuple, block: tl.tensor, stop: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """The granule of a block that lies in one, loaded a step before it is needed; else anything."""
    granule = block
    if SHAPE.one_granule and (SHAPE.scaled or SHAPE.paged):
        place = tl.minimum(block, stop - 1) * SHAPE.block_kv // SHAPE.granule_tokens
        granule = tl.load(kv.table + span.slot * kv.table_stride + place)
    return granule


@triton.jit  # type: ignore[untyped-decorator]
def load_units(
    kv: tl.tuple,
    span: tl.tuple,
    position: tl.tensor,
    granule: tl.tensor,
    VALUE: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tl.tuple:
    """The words of units of a block's keys, [warps, tokens, units_padded], or values, [warps, units_padded, tokens].

    Outside the span, where blocks lie in one granule, what is stored there; but no NaN among values. Else 0.
    """
    token = block_tokens(SHAPE)
    unit = tl.arange(0, SHAPE.units_padded)
    inside = inside_span(token, position, span, SHAPE)
    payload = kv.payload + (span.head.to(tl.int64) * kv.head_stride + VALUE * kv.value_stride) * SHAPE.step
    if SHAPE.paged and not SHAPE.one_granule:
        place = (position + token) // SHAPE.granule_tokens
        granules = tl.load(kv.table + span.slot * kv.table_stride + place, mask=inside, other=0)
        row = granules.to(tl.int64) * SHAPE.granule_tokens + (position + token) % SHAPE.granule_tokens
        offset = row * kv.row_stride * SHAPE.step
    else:
        first = span.base_row + position
        if SHAPE.paged:
            first = granule.to(tl.int64) * SHAPE.granule_tokens + position % SHAPE.granule_tokens
        payload += first * kv.row_stride * SHAPE.step
        offset = token * kv.row_stride * SHAPE.step
    if VALUE:
        places = payload + (offset[:, None, :] + unit[None, :, None])
        mask = inside[:, None, :]
        used = (unit < SHAPE.units)[None, :, None]
    else:
        places = payload + (offset[:, :, None] + unit[None, None, :])
        mask = inside[:, :, None]
        used = (unit < SHAPE.units)[None, None, :]
    # The rest of a granule is the sequence's own memory. Its scores are hidden; values must be numbers,
    # as `bounded` codes are.
    WORDS: tl.constexpr = SHAPE.words
    words: tl.tuple = ()
    for word in tl.static_range(WORDS):
        if SHAPE.one_granule and (SHAPE.bounded or not VALUE):
            if SHAPE.units == SHAPE.units_padded:
                units = tl.load(places + word * SHAPE.units)
            else:
                units = tl.load(places + word * SHAPE.units, mask=used, other=0)
        else:
            units = tl.load(places + word * SHAPE.units, mask=mask & used, other=0)
        words += (units,)
    return words


@triton.jit  # type: ignore[untyped-decorator]
def load_scales(
    kv: tl.tuple,
    span: tl.tuple,
    position: tl.tensor,
    granule: tl.tensor,
    VALUE: tl.constexpr,
    PLANE: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tl.tensor:
    """Scales (plane 0) or zeros (plane 1) of a block, float32 [warps, tokens].

    Outside the span anything where blocks lie in one granule, else 0. Loaded as words of two: the pipeline copies
    nothing narrower than 32 bits.
    """
    scales = kv.scales.to(tl.pointer_type(tl.int32))
    offset = span.head * kv.scale_head_stride + VALUE * kv.scale_value_stride + PLANE * kv.scale_plane_stride
    if SHAPE.one_granule:
        start = granule.to(tl.int64) * kv.scale_granule_stride + offset + position % SHAPE.granule_tokens
        pair = tl.arange(0, SHAPE.warps)[:, None] * (SHAPE.tokens // 2) + tl.arange(0, SHAPE.tokens // 2)[None, :]
        words = tl.load(scales + start // 2 + pair)
        pairs = tl.join(words, words >> 16)
        tiles = tl.reshape(pairs, (SHAPE.warps, SHAPE.tokens // 16, 8, 2))
        halves = tl.reshape(tl.permute(tiles, (0, 1, 3, 2)), (SHAPE.warps, SHAPE.tokens))
    else:
        token = position + block_tokens(SHAPE)
        inside = inside_span(block_tokens(SHAPE), position, span, SHAPE)
        table = kv.table + span.slot * kv.table_stride
        granules = tl.load(table + token // SHAPE.granule_tokens, mask=inside, other=0)
        place = granules.to(tl.int64) * kv.scale_granule_stride + offset + token % SHAPE.granule_tokens
        words = tl.load(scales + place // 2, mask=inside, other=0)
        halves = words >> (place % 2).to(tl.int32) * 16
    # The lower 16 bits, taken for what they are.
    return halves.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
