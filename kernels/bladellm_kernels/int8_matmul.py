"""Product of 8-bit integer matrices with exact integer sums, so that a row never depends on the rows beside it.

CPU: oneDNN, weight in its blocked layout, where it is exact (AVX2 processors without VNNI saturate); CUDA:
`torch._int_mm`; elsewhere float32 products of so few columns that they are exact.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
import torch.nn.functional as F

MIDDLE = 128
"""The code of 0 in the left matrix."""

_EXACT_COLUMNS = 1024
"""float32 counts to 2^24: sums of 1024 products of two numbers of magnitude up to 128 are exact."""

_INT_MM_MULTIPLE, _INT_MM_ROWS = 16, 32
"""`torch._int_mm` takes multiples of 8 in K and N and more than 16 rows; both sides are padded with zeros."""


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """A weight `scales · (codes − zeros)`, [N, K], in the layout of `kernel`.

    weight: int8, codes − 128. scales: float32 [N]. shifts: float32 [N], scales · (128 − zeros), None where all zeros
    are 128. origin: int32 [N] of 0, which oneDNN asks for.
    """

    shape: tuple[int, int]
    kernel: Literal["onednn", "int_mm", "float"]
    weight: torch.Tensor
    scales: torch.Tensor
    shifts: torch.Tensor | None
    origin: torch.Tensor


def pack_int8(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> PackedInt8:
    """codes: uint8 [N, K]; scales: floating point [N, 1]; zeros: uint8 [N, 1], None for 128."""
    rows, columns = codes.shape
    scales = scales.float().reshape(rows).contiguous()
    shifts = None if zeros is None else scales * (MIDDLE - zeros.float().reshape(rows))
    weight = (codes ^ MIDDLE).view(torch.int8)
    origin = torch.zeros(rows, dtype=torch.int32, device=codes.device)
    if codes.is_cuda and hasattr(torch, "_int_mm"):
        return PackedInt8((rows, columns), "int_mm", pad_weight(codes), scales, shifts, origin)
    if codes.is_cpu and _onednn_is_exact():
        packed = torch.ops.onednn.qlinear_prepack(weight.contiguous(), None)
        return PackedInt8((rows, columns), "onednn", packed, scales, shifts, origin)
    return PackedInt8((rows, columns), "float", weight.contiguous(), scales, shifts, origin)


def int8_matmul(codes: torch.Tensor, packed: PackedInt8) -> torch.Tensor:
    """`(codes − 128) @ weight.T`. codes: uint8 [T, K]. Returns float32 [T, N]: integer sums, rounded once, scaled."""
    if not len(codes):
        return packed.scales.new_empty(0, packed.shape[0])
    if packed.kernel == "onednn":
        y = _onednn_matmul(codes, packed.weight, packed.scales, packed.origin)
    else:
        y = _sums(codes, packed).float().mul_(packed.scales)
    if packed.shifts is not None:
        row_sums = codes.sum(dim=1, dtype=torch.int64).sub_(MIDDLE * codes.shape[1])
        y.addcmul_(row_sums.float().unsqueeze(1), packed.shifts)
    return y


def _sums(codes: torch.Tensor, packed: PackedInt8) -> torch.Tensor:
    """The integer sums, int32 [T, N]."""
    if packed.kernel == "int_mm":
        return padded_int_mm(codes, packed.weight, packed.shape[0])
    return _float_sums(codes, packed.weight)


def _onednn_matmul(
    codes: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, origin: torch.Tensor
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        codes, 1.0, MIDDLE, weight, scales, origin, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def pad_weight(codes: torch.Tensor) -> torch.Tensor:
    """codes: uint8 [N, K]. Returns codes − 128, int8, zeros filling both sizes up to what `torch._int_mm` takes."""
    rows, columns = codes.shape
    padding = (0, -columns % _INT_MM_MULTIPLE, 0, -rows % _INT_MM_MULTIPLE)
    return F.pad((codes ^ MIDDLE).view(torch.int8), padding).contiguous()


def padded_int_mm(codes: torch.Tensor, weight: torch.Tensor, rows: int) -> torch.Tensor:
    """`(codes − 128) @ weight.T`. codes: uint8 [T, K]; weight: of `pad_weight`, `rows` of it counting. Returns int32
    [T, rows]."""
    padding = (0, weight.shape[1] - codes.shape[1], 0, max(0, _INT_MM_ROWS - len(codes)))
    sums: torch.Tensor = torch._int_mm(F.pad((codes ^ MIDDLE).view(torch.int8), padding), weight.t())
    return sums[: len(codes), :rows]


def _float_sums(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Exact products a block of columns at a time, summed as integers. Returns int32 [T, N]."""
    sums = torch.zeros(len(codes), len(weight), dtype=torch.int32, device=codes.device)
    for left, right in zip(codes.split(_EXACT_COLUMNS, dim=1), weight.split(_EXACT_COLUMNS, dim=1), strict=True):
        sums += ((left.float() - MIDDLE) @ right.float().t()).to(torch.int32)
    return sums


@lru_cache(maxsize=1)
def _onednn_is_exact() -> bool:
    """Whether oneDNN's int8 product is there and exact at the largest values."""
    codes = torch.tensor([[255, 0, 255]], dtype=torch.uint8).repeat(2, 64)
    weight = torch.tensor([[127, -128, 127], [-128, 127, -128]], dtype=torch.int8).repeat(16, 64)
    ones, origin = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.int32)
    try:
        y = _onednn_matmul(codes, torch.ops.onednn.qlinear_prepack(weight, None), ones, origin)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return torch.equal(y, _float_sums(codes, weight).float())
