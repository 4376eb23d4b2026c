"""Linear layer of a 4-bit integer weight, one scale a group of inputs or an output channel; activations unrounded.

On a CPU few rows go through PyTorch's packed int4 kernel, which computes in bfloat16 with float32 sums, also for
float32 activations: a relative error near 2^-9, a small part of what rounding a weight to 4 bits does. Many rows, and
layouts the kernel does not know, are multiplied with the dequantized weight, a block at a time, in the activations' own
type. On CUDA 16-bit activations are multiplied by the codes themselves, see `unit_linear.py`.
"""

from dataclasses import dataclass

import torch

from bladellm_kernels.block_linear import BlockWeight, block_linear, block_weight
from bladellm_kernels.int4_matmul import PackedInt4, int4_matmul, kernel_group_size, pack_int4, tile_linear
from bladellm_kernels.linear_checks import check_codes, check_input
from bladellm_kernels.linear_reference import reference_linear
from bladellm_kernels.weight_units import UnitWeight, pack_units, runs_on_units

_BITS, _MIDDLE = 4, 8.0

KERNEL_ROWS = 64
"""Most rows the int4 kernel is faster for than dequantizing the weight once (measured)."""


@dataclass(frozen=True, slots=True)
class PackedW4A16:
    """A 4-bit weight of `shape` [N, K] for activations of `dtype`, in the layout of its device."""

    shape: tuple[int, int]
    dtype: torch.dtype
    weight: PackedInt4 | UnitWeight | BlockWeight


def pack_w4a16(
    codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> PackedW4A16:
    """Lay out the weight `scales · (codes − zeros)` for `w4a16_linear`, on the device of the codes.

    codes: uint8 [N, K], 0 to 15; scales: floating point [N, G], each for K / G inputs; zeros: uint8 [N, G], None for 8;
    dtype: of the activations: float32, bfloat16 or float16. Raises ValueError naming the argument that is wrong.
    """
    check_codes(codes, scales, zeros, dtype, torch.uint8, 2**_BITS)
    rows, columns = codes.shape
    if runs_on_units(codes, scales, dtype, _BITS):
        return PackedW4A16((rows, columns), dtype, pack_units(codes, scales, zeros, _BITS))
    size = kernel_group_size(codes, scales.shape[1])
    if size is None:
        return PackedW4A16((rows, columns), dtype, block_weight(codes, scales, zeros, _BITS, _MIDDLE))
    wide = scales.float()
    offsets = torch.zeros_like(wide) if zeros is None else (_MIDDLE - zeros.float()) * wide
    return PackedW4A16((rows, columns), dtype, pack_int4(codes, wide, offsets, size, dtype))


def w4a16_linear(x: torch.Tensor, packed: PackedW4A16, bias: torch.Tensor | None = None) -> torch.Tensor:
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
    if len(x) <= KERNEL_ROWS:
        y = int4_matmul(x.to(torch.bfloat16), weight)
    else:
        y = tile_linear(x if x.dtype == torch.bfloat16 else x.float(), weight)
    return (y if bias is None else y + bias).to(x.dtype).contiguous()


def w4a16_linear_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same from the codes, as `pack_w4a16` takes them. Returns float64 [T, N]."""
    return reference_linear(x, codes, scales, zeros, _MIDDLE, bias)
