"""Product with a 4-bit weight on a CPU: PyTorch's packed kernel in bfloat16, and the way back from its layout."""

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from bladellm_kernels.block_linear import weight_blocks

_GROUP_SIZES = (256, 128, 64, 32)
_TILE = 64
"""Output channels the kernel works on at a time: byte d of a tile's input holds channels d (low half) and 32 + d."""

_PACK_ROWS = 16 * _TILE
_MIDDLE = 8


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A weight `scales · (codes − 8) + offsets`, [N, K], N padded to a multiple of 64.

    codes: uint8 [N / 64, K, 32]. factors: bfloat16 [K / group_size, N, 2], scales and offsets. wide: the same in
    float32, or `factors` itself where the activations are bfloat16.
    """

    rows: int
    group_size: int
    codes: torch.Tensor
    factors: torch.Tensor
    wide: torch.Tensor

    def read(self, part: slice, codes: torch.Tensor, values: torch.Tensor) -> None:
        """Write tiles `part` of the weight, transposed, into `values`, float32 [tiles, K, 64]; `codes` is workspace,
        uint8 of the same shape."""
        halves = self.codes[part]
        torch.cat((halves & 15, halves >> 4), dim=2, out=codes)
        factors = self.wide.view(-1, len(self.codes), _TILE, 2)[:, part].permute(3, 1, 0, 2).float().contiguous()
        scales, offsets = factors.unsqueeze(3)
        grouped = values.copy_(codes).view(len(halves), -1, self.group_size, _TILE)
        torch.addcmul(offsets - _MIDDLE * scales, grouped, scales, out=grouped)


def kernel_group_size(codes: torch.Tensor, groups: int) -> int | None:
    """The group size to give the kernel for codes [N, K] with `groups` scales a row; None where it cannot run."""
    size = codes.shape[1] // groups
    fitting = (each for each in _GROUP_SIZES if size and size % each == 0)
    return next(fitting, None) if codes.is_cpu and has_int4_kernel() else None


def pack_int4(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, group_size: int, dtype: torch.dtype
) -> PackedInt4:
    """codes: uint8 [N, K], 0 to 15; scales, offsets: float32 [N, G]; group_size: of `kernel_group_size`; dtype: of the
    activations."""
    rows, columns = codes.shape
    padding = -rows % _TILE
    blocks = [_pack_tiles(F.pad(block, (0, 0, 0, -len(block) % _TILE))) for block in codes.split(_PACK_ROWS)]
    factors = F.pad(torch.stack((scales, offsets), dim=2), (0, 0, 0, 0, 0, padding))
    repeats = columns // scales.shape[1] // group_size
    factors = factors.repeat_interleave(repeats, dim=1).transpose(0, 1).contiguous()
    rounded = factors.to(torch.bfloat16)
    return PackedInt4(rows, group_size, torch.cat(blocks), rounded, rounded if dtype == torch.bfloat16 else factors)


def int4_matmul(x: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    """`x @ weight.T` for few rows. x: bfloat16 [T, K]. Returns bfloat16 [T, N], summed in float32."""
    tiles, columns, _ = packed.codes.shape
    y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu.default(
        x.contiguous(), packed.codes.view(tiles * _TILE, columns // 2), packed.group_size, packed.factors
    )
    return y[:, : packed.rows]


def tile_linear(x: torch.Tensor, packed: PackedInt4) -> torch.Tensor:
    """`x @ weight.T` for many rows, tiles of the weight dequantized one after the other.

    x: bfloat16 or float32 [T, K], or [T, K / s] where every s-th part of the weight's columns multiplies the same
    inputs. Returns [T, N] of x's type.
    """
    tiles, columns, _ = packed.codes.shape
    y = x.new_empty(len(x), tiles, _TILE)
    codes = values = torch.empty(0)
    for part in weight_blocks(tiles, columns * _TILE, x.device):
        shape = (part.stop - part.start, columns, _TILE)
        if values.shape != shape:  # One workspace for all blocks: fresh pages would cost more than the arithmetic.
            codes, values = torch.empty(shape, dtype=torch.uint8), torch.empty(shape)
        packed.read(part, codes, values)
        weight = values
        for other in values.split(x.shape[1], dim=1)[1:]:
            weight = values[:, : x.shape[1]].add_(other)
        y[:, part] = torch.matmul(x, weight.to(x.dtype)).transpose(0, 1)
    return y.view(len(x), -1)[:, : packed.rows]


def _pack_tiles(codes: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.to(torch.int32), 1)
    return packed.view(-1, codes.shape[1], _TILE // 2)


@lru_cache(maxsize=1)
def has_int4_kernel() -> bool:
    """Whether the kernel is there and stores tiles as `PackedInt4` says; other processors have other tiles."""
    codes = torch.arange(2 * _TILE * 32).remainder(251).remainder(16).to(torch.uint8).view(2 * _TILE, 32)
    tiles = codes.view(2, _TILE, 32).transpose(1, 2)
    try:
        packed = _pack_tiles(codes)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(torch.cat((packed & 15, packed >> 4), dim=2), tiles)
