"""Linear layer of an 8-bit integer weight, one scale a group of inputs or an output channel; activations unrounded.

On a CPU a weight with one scale an output channel is multiplied in integers: activations become fixed-point numbers of
two 8-bit digits (three for float32), which keep 15 (23) bits of each row's largest value: no precision is lost to
the weight's side, and a row does not depend on its neighbours. With several scales an output channel the two halves of
a code are two 4-bit codes, and the weight is a 4-bit one with twice the inputs. All other layouts are dequantized a
block at a time. On CUDA 16-bit activations are multiplied by the codes themselves where no zero point is stored, see
`unit_linear.py`.
"""

from dataclasses import dataclass

import torch

from bladellm_kernels.block_linear import BlockWeight, block_linear, block_weight
from bladellm_kernels.fixed_point import fixed_point_linear
from bladellm_kernels.int4_matmul import PackedInt4, int4_matmul, kernel_group_size, pack_int4, tile_linear
from bladellm_kernels.int8_matmul import PackedInt8, pack_int8
from bladellm_kernels.linear_checks import check_codes, check_input
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.weight_units import UnitWeight, pack_units, runs_on_units

_BITS, _MIDDLE = 8, 128.0
_HALF_MIDDLE = 8.0

KERNEL_ROWS = 64
"""Most rows the int4 kernel is faster for than dequantizing the weight once (measured)."""


_PLAIN_ELEMENTS, _PLAIN_ROWS, _PLAIN_MULTIPLE = 1 << 20, 2, 32
"""Up to this size a bfloat16 layer of few rows is over before integer arithmetic is set up; it keeps a plain copy."""


@dataclass(frozen=True, slots=True)
class PlainInt8:
    """codes: int8 [N, K], less 128; scales: bfloat16 [N]."""

    codes: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class PackedW8A16:
    """An 8-bit weight of `shape` [N, K] for activations of `dtype`, in the layout of its device."""

    shape: tuple[int, int]
    dtype: torch.dtype
    weight: PackedInt8 | PackedInt4 | UnitWeight | BlockWeight
    plain: PlainInt8 | None = None


def pack_w8a16(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> PackedW8A16:
    """Lay out the weight `scales · (codes − zeros)` for `w8a16_linear`, on the device of the codes.

    codes: uint8 [N, K]; scales: floating point [N, G], each for K / G inputs; zeros: uint8 [N, G], None for 128;
    dtype: of the activations: float32, bfloat16 or float16. Raises ValueError naming the argument that is wrong.
    """
    check_codes(codes, scales, zeros, dtype, torch.uint8)
    rows, columns = codes.shape
    if codes.is_cpu and scales.shape[1] == 1:
        return PackedW8A16((rows, columns), dtype, pack_int8(codes, scales, zeros), _plain(codes, scales, zeros, dtype))
    if zeros is None and runs_on_units(codes, scales, dtype, _BITS):
        return PackedW8A16((rows, columns), dtype, pack_units(codes, scales, None, _BITS))
    size = kernel_group_size(codes, scales.shape[1])
    if size is None:
        return PackedW8A16((rows, columns), dtype, block_weight(codes, scales, zeros, _BITS, _MIDDLE))
    return PackedW8A16((rows, columns), dtype, _pack_halves(codes, scales.float(), zeros, size, dtype))


def w8a16_linear(x: torch.Tensor, packed: PackedW8A16, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weight.T + bias`.

    x: [T, K] of the packed type; bias: [N] of x's type or None. Returns [T, N] of x's type. Raises ValueError naming
    the argument that is wrong.
    """
    check_input(x, bias, *packed.shape, packed.dtype)
    weight = packed.weight
    if isinstance(weight, BlockWeight):
        return block_linear(x, weight, bias)
    if isinstance(weight, UnitWeight):
        from bladellm_kernels.unit_linear import unit_linear

        return unit_linear(x, weight, bias)
    if packed.plain is not None and 0 < len(x) <= _PLAIN_ROWS:
        y = torch._weight_int8pack_mm(x.contiguous(), packed.plain.codes, packed.plain.scales)
        return y if bias is None else y + bias
    if isinstance(weight, PackedInt8):
        return fixed_point_linear(x, weight, bias, digits=3 if x.dtype == torch.float32 else 2)
    y = _halves_linear(x, weight)
    return (y if bias is None else y + bias).to(x.dtype).contiguous()


def w8a16_linear_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same from the codes, as `pack_w8a16` takes them. Returns float64 [T, N]."""
    return reference_linear(x, codes, scales, zeros, _MIDDLE, bias)


def _plain(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> PlainInt8 | None:
    fits = codes.numel() <= _PLAIN_ELEMENTS and all(size % _PLAIN_MULTIPLE == 0 for size in codes.shape)
    if zeros is not None or dtype != torch.bfloat16 or not fits or not hasattr(torch, "_weight_int8pack_mm"):
        return None
    return PlainInt8((codes ^ 0x80).view(torch.int8), scales.reshape(-1).to(dtype).contiguous())


def _pack_halves(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, size: int, dtype: torch.dtype
) -> PackedInt4:
    """A 4-bit weight [N, 2K]: the codes' high halves with 16 times the scales, then their low halves."""
    shifts = torch.zeros_like(scales) if zeros is None else (_MIDDLE - zeros.float()) * scales
    # What the kernel's bfloat16 loses of the large offset goes into the small one.
    high = shifts.to(torch.bfloat16).float()
    low = shifts - high + _HALF_MIDDLE * scales
    return pack_int4(
        torch.cat((codes >> 4, codes & 15), dim=1),
        torch.cat((16 * scales, scales), dim=1),
        torch.cat((high, low), dim=1),
        size,
        dtype,
    )


def _halves_linear(x: torch.Tensor, weight: PackedInt4) -> torch.Tensor:
    if len(x) <= KERNEL_ROWS:
        return int4_matmul(x.to(torch.bfloat16).repeat(1, 2), weight)
    return tile_linear(x if x.dtype == torch.bfloat16 else x.float(), weight)
