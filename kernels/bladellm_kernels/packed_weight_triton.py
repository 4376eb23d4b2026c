"""The CUDA kernels of `pack_weight`: the factors of rows, then tiles; see `packed_weight.py` for the format."""

import torch
import triton
import triton.language as tl

from bladellm_kernels import packed_weight

TILE = tl.constexpr(packed_weight.TILE)
NUMBER_BYTES = tl.constexpr(packed_weight.NUMBER_BYTES)
TILE_BYTES = tl.constexpr(packed_weight.TILE_BYTES)
PART_BYTES = tl.constexpr(packed_weight.NUMBER_BYTES // 3)
WARPS, PATCHES = tl.constexpr(packed_weight.WARPS), tl.constexpr(packed_weight.PATCHES)
CODES, TOP = tl.constexpr(packed_weight.CODES), tl.constexpr(packed_weight.TOP)
GATE_ROWS = tl.constexpr(packed_weight.GATE_ROWS)
WINDOWS = tl.constexpr(packed_weight.WINDOWS)
NO_PATCH = tl.constexpr(packed_weight.NO_PATCH)

BINS = tl.constexpr(32)
"""Of exponents below the largest of a row: more than a code has in any window, a power of two."""
NO_KEY = tl.constexpr(2**31 - 1)
"""Behind the keys of all numbers."""
THREAD_NUMBERS = tl.constexpr(16)
"""A third of the bytes of a thread's numbers."""

NUMBERS_PER_WARP, MOST_WARPS, TILE_WARPS = 1024, 32, 8
"""Of a row, in registers: numbers of a warp; warps at most; and the warps of a tile."""


@triton.jit  # type: ignore[untyped-decorator]
def source_row(row: tl.tensor, rows: tl.tensor, GATED: tl.constexpr) -> tl.tensor:
    """int64: the row of the weight that lies at a row of the tiles."""
    if GATED:
        pair = row // (2 * GATE_ROWS)
        is_up = row // GATE_ROWS % 2
        row = is_up * (rows // 2) + pair * GATE_ROWS + row % GATE_ROWS
    return row.to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def row_factors_kernel(
    bits: tl.tensor, factors: tl.tensor, stride: tl.tensor, rows: tl.tensor,
    N: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row. bits: int16, of the weight; factors: int32, the bits of what they are as float32."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < N
    numbers = tl.load(bits + source_row(row, rows, GATED) * stride + column, mask=inside, other=0).to(tl.int32)
    exponents = (numbers >> 7) & 0xFF
    top = tl.max(exponents, 0)
    # Of those in the last bin, and behind the row, no window has any.
    below = tl.where(inside, tl.minimum(top - exponents, BINS - 1), BINS - 1)
    counts = tl.histogram(below, BINS)
    window, each = tl.arange(0, CODES)[:, None], tl.arange(0, BINS)[None, :]
    coded = tl.sum(tl.where((each >= window) & (each < window + CODES), counts[None, :], 0), 1)
    coded = tl.where(tl.arange(0, CODES) < WINDOWS, coded, -1)
    largest = top - tl.argmax(coded, 0, tie_break_left=True)
    # 2^(largest - 127); a row whose largest is 0 has nothing but zeros, or is not packed.
    tl.store(factors + row, largest << 23)


@triton.jit  # type: ignore[untyped-decorator]
def pack_tiles_kernel(
    bits: tl.tensor, factors: tl.tensor, tiles: tl.tensor, words: tl.tensor, refused: tl.tensor,
    stride: tl.tensor, rows: tl.tensor, DEEP: tl.constexpr, GATED: tl.constexpr,
) -> None:  # fmt: skip
    """One program a tile. bits, factors: as of `row_factors_kernel`; tiles: uint8, and the same memory as int32 in
    words; refused: int32, gets a 1 where the numbers cannot be packed. DEEP: tiles of a row."""
    tile = tl.program_id(0)
    row = tile // DEEP * TILE + tl.arange(0, TILE)
    column = tile % DEEP * TILE + tl.arange(0, TILE)
    numbers = tl.load(bits + source_row(row, rows, GATED)[:, None] * stride + column[None, :]).to(tl.int32) & 0xFFFF
    largest = tl.load(factors + row)[:, None] >> 23
    codes = ((numbers >> 7) & 0xFF) - largest + (CODES - 1)
    place = tile.to(tl.int64) * TILE_BYTES
    _store_numbers(tiles + place, numbers, tl.minimum(tl.maximum(codes, 0), CODES - 1))
    _store_patches(words + (place + NUMBER_BYTES) // 4, refused, numbers, codes)


@triton.jit  # type: ignore[untyped-decorator]
def _store_numbers(tile: tl.tensor, numbers: tl.tensor, codes: tl.tensor) -> None:
    """numbers: bits; codes: 0 to 15; both int32 [64, 64]."""
    thread = tl.arange(0, 2 * TILE)[:, None]
    each = tl.arange(0, 2 * THREAD_NUMBERS)[None, :]
    # Of a row: warp, half of 16, lane / 4. Of a column: product, half of 16, lane % 4, which of a pair.
    low = tl.reshape(((codes & 1) << 7 | numbers & 0x7F).to(tl.uint8), (WARPS, 2, 8, 4, 2, 4, 2))
    low = tl.reshape(tl.permute(low, (0, 2, 5, 3, 4, 1, 6)), (2 * TILE, 2 * THREAD_NUMBERS))
    part = each // THREAD_NUMBERS * PART_BYTES
    tl.store(tile + part + thread * THREAD_NUMBERS + each % THREAD_NUMBERS, low)
    high = tl.reshape((numbers >> 15 << 3 | codes >> 1).to(tl.uint8), (WARPS, 2, 8, 4, 2, 4, 2))
    first, second = tl.split(tl.permute(high, (0, 2, 5, 3, 1, 6, 4)))
    both = (first & 8) << 4 | first & 7 | second & 8 | (second & 7) << 4
    both = tl.reshape(both, (2 * TILE, THREAD_NUMBERS))
    byte = tl.arange(0, THREAD_NUMBERS)[None, :]
    tl.store(tile + 2 * PART_BYTES + thread * THREAD_NUMBERS + byte, both)


@triton.jit  # type: ignore[untyped-decorator]
def _store_patches(words: tl.tensor, refused: tl.tensor, numbers: tl.tensor, codes: tl.tensor) -> None:
    """codes: int32 [64, 64], outside 0 to 15 of numbers that have none; words: of the tile's patches."""
    exponents = (numbers >> 7) & 0xFF
    special = (exponents == 0) | (exponents == 0xFF)
    # A row whose largest exponent is 0 is empty, or has a denormal number, for which the weight is refused.
    in_empty = ((numbers & 0x7FFF) == 0) & (codes == CODES - 1)
    left_out = (((codes & -CODES) != 0) | special) & ~in_empty
    patches = tl.full((WARPS, PATCHES), NO_PATCH, tl.int32)
    # Most tiles have none.
    if tl.max(left_out.to(tl.int32)) != 0:
        patches = _patches(patches, refused, numbers, codes, left_out)
    tl.store(words + tl.arange(0, WARPS)[:, None] * PATCHES + tl.arange(0, PATCHES)[None, :], patches)


@triton.jit  # type: ignore[untyped-decorator]
def _patches(
    patches: tl.tensor, refused: tl.tensor, numbers: tl.tensor, codes: tl.tensor, left_out: tl.tensor
) -> tl.tensor:
    """patches, [4, 8], with those of the numbers that are left out in front; as many as there is room for."""
    exponents = (numbers >> 7) & 0xFF
    shifted = codes - (CODES - 1) + TOP
    zero = (numbers & 0x7FFF) == 0
    lost = (exponents == 0) | (exponents == 0xFF) | (shifted <= 0) | (shifted >= 0xFF)
    value = (numbers & 0x807F | tl.where(zero, 0, shifted << 7)) & 0xFFFF
    keys = tl.where(left_out, _places() << 16 | value, NO_KEY)
    keys = tl.reshape(keys, (WARPS, TILE * TILE // WARPS))
    used = tl.max(tl.sum((keys != NO_KEY).to(tl.int32), 1), 0)
    for slot in range(tl.minimum(used, PATCHES)):
        key = tl.min(keys, 1)[:, None]
        keys = tl.where(keys == key, NO_KEY, keys)
        patches = tl.where(tl.arange(0, PATCHES)[None, :] == slot, _word(key), patches)
    tl.store(refused, 1, mask=(used > PATCHES) | (tl.max((left_out & lost & ~zero).to(tl.int32)) != 0))
    return patches


@triton.jit  # type: ignore[untyped-decorator]
def _places() -> tl.tensor:
    """int32 [64, 64], of the numbers of a tile: lane in bits 9..5, its pair in 4..1, which of that in 0."""
    row, column = tl.arange(0, TILE)[:, None], tl.arange(0, TILE)[None, :]
    lane = row % 8 * 4 + column % 8 // 2
    pair = column // 16 * 4 + column % 16 // 8 * 2 + row % 16 // 8
    return lane << 5 | pair << 1 | column % 2


@triton.jit  # type: ignore[untyped-decorator]
def _word(key: tl.tensor) -> tl.tensor:
    """The patch of a place in bits 25..16 and a value in 15..0, or NO_PATCH."""
    place = key >> 16
    word = key << 16 | (place & 1) << 9 | (place >> 1 & 15) << 5 | place >> 5
    return tl.where(key == NO_KEY, NO_PATCH, word)


def launch_pack(weight: torch.Tensor, gated: bool, tiles: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Write the tiles and factors of a `PackedWeight`, without waiting for them.

    weight: bfloat16 [N, K] that `can_pack`, on the current device; tiles: uint8 [N / 64, K / 64, TILE_BYTES] and
    factors: float32 [N], contiguous. Returns int32 [1] there, not 0 where the weight cannot be packed: what is written
    is then of no use.
    """
    bits = (weight if weight.stride(1) == 1 else weight.contiguous()).view(torch.int16)
    rows, inputs = bits.shape
    refused = torch.zeros(1, dtype=torch.int32, device=weight.device)
    factor_bits = factors.view(torch.int32)
    block = triton.next_power_of_2(inputs)
    row_factors_kernel[(rows,)](
        bits, factor_bits, bits.stride(0), rows, inputs, block, gated,
        num_warps=min(max(block // NUMBERS_PER_WARP, 1), MOST_WARPS),
    )  # fmt: skip
    pack_tiles_kernel[(tiles.shape[0] * tiles.shape[1],)](
        bits, factor_bits, tiles, tiles.view(torch.int32), refused, bits.stride(0), rows, tiles.shape[1], gated,
        num_warps=TILE_WARPS,
    )  # fmt: skip
    return refused
