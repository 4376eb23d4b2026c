"""Weights of bfloat16 in 12 bits a number, without loss: what `packed_linear` reads.

Exponents of a row's weights lie close to each other: they have some 2.6 bits of information, of 8. A number keeps its
sign and its mantissa, 8 bits, and has 4 bits for its exponent among 16 that follow each other, chosen for each row so
that they leave out the fewest. The sums of a row are multiplied by a power of two in the end. Numbers that are left
out, one in some 10,000 of a trained or a random weight, lie beside their tile as patches, up to eight to a warp's part
of it; a weight that needs more is not packed.

The idea of fewer bits for exponents is known, with codes of variable length (https://arxiv.org/abs/2504.11651); those
of one length let every thread find its numbers.
"""

from dataclasses import dataclass
from functools import cache

import torch

from bladellm_kernels.has_triton import has_triton

TILE = 64
"""Rows, and inputs, of a tile, which one warpgroup multiplies."""
NUMBER_BYTES, WARPS, PATCHES = 6144, 4, 8
"""Of a tile: bytes of its numbers, warps, and patches of each, words of 32 bits."""
TILE_BYTES = NUMBER_BYTES + 4 * PATCHES * WARPS
BITS = 8 * TILE_BYTES / TILE**2
"""Of a number, with patches."""

CODES = 16
"""Exponents that have a code, the largest one's is 15."""
TOP = 127
"""The exponent that the largest code stands for in registers: that of 1.0."""
GATE_ROWS = 8
"""Rows of the gate that lie in front of as many of up, where a gate follows."""

WINDOWS = 12
"""Tried: the largest exponent of a row, and those below it."""
NO_PATCH = -1
"""The word where there is none."""

_CHUNK = 2**24
"""Numbers that the reference packs at a time."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] in tiles: uint8 [N / 64, K / 64, TILE_BYTES]; factors: float32 [N], of rows as they lie there.

    gated: 8 rows of the gate, the first half of the weight's rows, and 8 of up lie in turn.
    """

    tiles: torch.Tensor
    factors: torch.Tensor
    gated: bool

    @property
    def rows(self) -> int:
        return len(self.factors)

    @property
    def inputs(self) -> int:
        return self.tiles.shape[1] * TILE

    @property
    def outputs(self) -> int:
        """Of a row of x, behind the gate if there is one."""
        return self.rows // (1 + self.gated)

    @property
    def bytes(self) -> int:
        return self.tiles.nbytes + self.factors.nbytes


def packed_bytes(rows: int, inputs: int) -> int:
    """Of a weight that is packed."""
    return rows // TILE * (inputs // TILE) * TILE_BYTES + 4 * rows


def can_pack(weight: torch.Tensor) -> bool:
    """Whether its type and shape are such that it may be packed."""
    whole = weight.ndim == 2 and len(weight) > 0 and not any(size % TILE for size in weight.shape)
    return whole and weight.dtype == torch.bfloat16


def pack_weight(weight: torch.Tensor, gated: bool = False) -> PackedWeight | None:
    """The weight [N, K] packed, on its device, or None where its numbers cannot be: infinite ones, or too many that lie
    far from the others of their rows. Raises ValueError where `can_pack` says no.

    On CUDA, where triton is installed, two kernels, for whose end it waits.
    """
    if not (weight.is_cuda and has_triton()):
        return pack_weight_reference(weight, gated)
    packed = _to_be_packed(weight, gated)
    from bladellm_kernels.packed_weight_triton import launch_pack

    refused = launch_pack(weight, gated, packed.tiles, packed.factors)
    return None if refused.item() else packed


def pack_weight_reference(weight: torch.Tensor, gated: bool = False) -> PackedWeight | None:
    """`pack_weight` in PyTorch's operators, the same bit for bit."""
    packed = _to_be_packed(weight, gated)
    rows, inputs = weight.shape
    step = max(_CHUNK // inputs // TILE, 1) * TILE
    for first in range(0, rows, step):
        last = min(first + step, rows)
        tiles = _pack_rows(_rows(weight, first, last, gated), packed.factors[first:last])
        if tiles is None:
            return None
        packed.tiles[first // TILE : last // TILE] = tiles
    return packed


def _to_be_packed(weight: torch.Tensor, gated: bool) -> PackedWeight:
    """The memory for it."""
    if not can_pack(weight):
        kind = f"{weight.dtype} {list(weight.shape)}"
        raise ValueError(f"a weight to pack must be bfloat16 of whole tiles of {TILE}, got {kind}")
    rows, inputs = weight.shape
    tiles = torch.empty(rows // TILE, inputs // TILE, TILE_BYTES, dtype=torch.uint8, device=weight.device)
    return PackedWeight(tiles, torch.empty(rows, dtype=torch.float32, device=weight.device), gated)


def unpack_weight(packed: PackedWeight) -> torch.Tensor:
    """The reference: the weight [N, K], its rows in their own order."""
    count, deep = packed.tiles.shape[:2]
    numbers = packed.tiles[..., :NUMBER_BYTES].reshape(count, deep, 3, 2 * TILE, 16).int()
    low = torch.cat((numbers[:, :, 0], numbers[:, :, 1]), -1)
    high = numbers[:, :, 2].view(count, deep, 2 * TILE, 4, 4)
    halves = torch.stack((high & 0x87, (high & 8) << 4 | high >> 4 & 7), -2).reshape(count, deep, 2 * TILE, 32)
    bits = (halves | 0x38) << 8 | low
    words = packed.tiles[..., NUMBER_BYTES:].contiguous().view(torch.int32).view(count, deep, WARPS, PATCHES).long()
    row, column, warp, _ = places = (words != NO_PATCH).nonzero(as_tuple=True)
    word = words[places] & 0xFFFFFFFF
    bits[row, column, 32 * warp + (word & 31), (word >> 5 & 15) * 2 + (word >> 9 & 1)] = (word >> 16).int()
    values = torch.empty(count, deep, TILE, TILE, dtype=torch.int32, device=bits.device)
    fragment = _fragment(bits.device)
    values[:, :, fragment[0], fragment[1]] = bits
    whole = values.permute(0, 2, 1, 3).reshape(packed.rows, packed.inputs)
    found = (whole << 16).view(torch.float32) * packed.factors[:, None]
    if packed.gated:
        found = found.view(-1, 2, GATE_ROWS, packed.inputs).transpose(0, 1).reshape(packed.rows, packed.inputs)
    return found.bfloat16()


@cache
def _fragment(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and input, in a tile, of a thread's number: [128, 32] each. Numbers 2 i and 2 i + 1 are register i of the
    left operand of four `wgmma` of 16 inputs."""
    thread, number = torch.meshgrid(torch.arange(2 * TILE), torch.arange(32), indexing="ij")
    warp, lane, register = thread // 32, thread % 32, number // 2
    row = 16 * warp + lane // 4 + 8 * (register % 2)
    column = 16 * (register // 4) + 2 * (lane % 4) + number % 2 + 8 * (register % 4 // 2)
    return row.to(device), column.to(device)


def _rows(weight: torch.Tensor, first: int, last: int, gated: bool) -> torch.Tensor:
    """Rows of the tiles from `first` to `last`."""
    if not gated:
        return weight[first:last]
    halves = weight.view(2, -1, weight.shape[1])[:, first // 2 : last // 2]
    return halves.reshape(2, -1, GATE_ROWS, weight.shape[1]).transpose(0, 1).reshape(last - first, -1)


def _pack_rows(weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor | None:
    """The tiles of some rows, whose factors are written; None where they cannot be packed."""
    bits = weight.contiguous().view(torch.int16)
    exponents = (bits >> 7) & 0xFF
    largest = _largest_coded(exponents)
    codes = exponents - (largest[:, None] - (CODES - 1))
    # No code is a zero's, but a row of nothing else is multiplied by zero.
    empty = (bits & 0x7FFF).amax(1) == 0
    left_out = ((codes < 0) | (codes >= CODES) | (exponents == 0) | (exponents == 0xFF)) & ~empty[:, None]
    factors.copy_(torch.exp2(largest.double() - TOP).masked_fill(empty, 0))
    codes.clamp_(0, CODES - 1)
    low = _tiled(((codes & 1) << 7 | bits & 0x7F).to(torch.uint8))
    high = _tiled(((bits >> 15 & 1) << 3 | codes >> 1).to(torch.uint8))
    words = _patches(bits, exponents.int() - largest[:, None] + TOP, _tiled(left_out))
    if words is None:
        return None
    count, deep = low.shape[:2]
    first, second = high.view(count, deep, 2 * TILE, 4, 2, 4).unbind(4)
    both = (first & 8) << 4 | first & 7 | second & 8 | (second & 7) << 4
    numbers = torch.stack((low[..., :16], low[..., 16:], both.reshape(count, deep, 2 * TILE, 16)), 2)
    return torch.cat((numbers.view(count, deep, NUMBER_BYTES), words.view(torch.uint8).view(count, deep, -1)), 2)


def _largest_coded(exponents: torch.Tensor) -> torch.Tensor:
    """int16 [N]: the largest exponent that has a code, so that the fewest of a row have none."""
    top = exponents.amax(1)
    left_out = []
    for below in range(WINDOWS):
        last = (top - below)[:, None]
        left_out.append(((exponents > last) | (exponents <= last - CODES)).sum(1, dtype=torch.int32))
    return top - torch.stack(left_out).argmin(0).to(torch.int16)


def _tiled(numbers: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [N / 64, K / 64, 128, 32]: of every thread its numbers of a tile."""
    rows, inputs = numbers.shape
    tiles = numbers.view(rows // TILE, TILE, inputs // TILE, TILE).transpose(1, 2)
    row, column = _fragment(numbers.device)
    return tiles[:, :, row, column]


def _patches(bits: torch.Tensor, exponents: torch.Tensor, left_out: torch.Tensor) -> torch.Tensor | None:
    """int32 [N / 64, K / 64, 4, 8]: the numbers of each warp's part of a tile that have no code, those in use in front.

    exponents: of all numbers [N, K], as registers are to have them; left_out: [N / 64, K / 64, 128, 32]. None where
    there are too many, or a number is none of bfloat16 there.
    """
    count, deep = left_out.shape[:2]
    words = torch.full((count * deep * WARPS, PATCHES), NO_PATCH, dtype=torch.int32, device=bits.device)
    tile_row, tile_column, thread, number = left_out.nonzero(as_tuple=True)
    if len(thread):
        row, column = (each[thread, number] for each in _fragment(bits.device))
        place = tile_row * TILE + row, tile_column * TILE + column
        found, exponent = bits[place].long() & 0xFFFF, exponents[place].long()
        zero = (found & 0x7FFF) == 0
        # Infinite numbers, and those that are or would be denormal.
        outside = (found >> 7 & 0xFF == 0xFF) | (found >> 7 & 0xFF == 0) | (exponent <= 0) | (exponent >= 0xFF)
        value = found & 0x807F | torch.where(zero, 0, exponent << 7)
        word = value << 16 | (number % 2) << 9 | (number // 2) << 5 | thread % 32
        part = (tile_row * deep + tile_column) * WARPS + thread // 32
        # Ascending, as they are found.
        among = torch.arange(len(part), device=part.device) - torch.searchsorted(part, part)
        if (outside & ~zero).any() or among.max() >= PATCHES:
            return None
        words[part, among] = torch.where(word > 2**31 - 1, word - 2**32, word).int()
    return words.view(count, deep, WARPS, PATCHES)
