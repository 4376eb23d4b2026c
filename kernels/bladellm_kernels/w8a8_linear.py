"""Linear layer of 8-bit integer weights, one scale an output channel, and activations rounded to 8 bits.

The input has one scale a row, found on the fly (its largest magnitude is 127), or the checkpoint's one scale. Sums are
exact integers, so a row's result does not depend on its neighbours.
"""

from dataclasses import dataclass

import torch

from bladellm_kernels.fixed_point import exact_quotients, fixed_point_linear, static_linear
from bladellm_kernels.int8_matmul import PackedInt8, pack_int8
from bladellm_kernels.linear_checks import check_codes, check_input, check_input_scale, is_hopper
from bladellm_kernels.linear_reference import reference_linear

_MIDDLE = 128.0


@dataclass(frozen=True, slots=True)
class PackedW8A8:
    """An 8-bit weight of `shape` [N, K] for activations of `dtype`, in the layout of its device."""

    shape: tuple[int, int]
    dtype: torch.dtype
    weight: PackedInt8


def pack_w8a8(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype) -> PackedW8A8:
    """Lay out the weight `scales · (codes − zeros)` for `w8a8_linear`, on the device of the codes.

    codes: uint8 [N, K]; scales: floating point [N, 1]; zeros: uint8 [N, 1], None for 128; dtype: of the activations:
    float32, bfloat16 or float16. Raises ValueError naming the argument that is wrong.
    """
    check_codes(codes, scales, zeros, dtype, torch.uint8)
    rows, columns = codes.shape
    if scales.shape[1] != 1:
        raise ValueError(f"scales must be [{rows}, 1], one an output channel, got {list(scales.shape)}")
    return PackedW8A8((rows, columns), dtype, pack_int8(codes, scales, zeros))


def w8a8_linear(
    x: torch.Tensor, packed: PackedW8A8, bias: torch.Tensor | None = None, input_scale: float | None = None
) -> torch.Tensor:
    """`round(x) @ weight.T + bias`, x rounded to 8 bits.

    x: [T, K] of the packed type; bias: [N] of x's type or None; input_scale: the static scale of x, None for one
    dynamic scale a row. Returns [T, N] of x's type. Raises ValueError naming the argument that is wrong.
    """
    check_input(x, bias, *packed.shape, packed.dtype)
    check_input_scale(input_scale)
    weight = packed.weight
    if is_hopper(x.device):
        from bladellm_kernels.eight_bit_linear import eight_bit_linear

        return eight_bit_linear(x, weight.weight, weight.scales, weight.shifts, bias, input_scale)
    if input_scale is None:
        return fixed_point_linear(x, packed.weight, bias, digits=1)
    return static_linear(x, packed.weight, bias, input_scale)


def w8a8_linear_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    input_scale: float | None = None,
) -> torch.Tensor:
    """The same from the codes, as `pack_w8a8` takes them. Returns float64 [T, N]."""
    wide = x.float()
    if input_scale is None:
        peaks = wide.abs().amax(dim=1, keepdim=True)
        steps = torch.where(peaks == 0, 1.0, exact_quotients(peaks, 127))
    else:
        steps = torch.tensor(input_scale, device=x.device)
    rounded = (wide / steps).round().clamp(-128, 127).double() * steps.double()
    return reference_linear(rounded, codes, scales, zeros, _MIDDLE, bias)
