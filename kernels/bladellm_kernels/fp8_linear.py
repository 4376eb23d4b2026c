"""Linear layer of a float8_e4m3fn weight, one scale an output channel; activations unrounded or in float8 as well.

float8 input has one scale a row, found on the fly (its largest magnitude is 448), or the checkpoint's one scale.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F

from bladellm_kernels.block_linear import BlockWeight, block_linear, block_weight, weight_blocks
from bladellm_kernels.fixed_point import exact_quotients, row_scales
from bladellm_kernels.linear_checks import check_codes, check_input, check_input_scale, is_hopper
from bladellm_kernels.linear_reference import reference_linear

Activations = Literal["none", "dynamic", "static"]

LARGEST = 448.0
"""Largest float8_e4m3fn."""

_FEW_TOKENS = 128
"""Most tokens multiplied by a Triton kernel; for more of them `torch._scaled_mm` is there."""

_SCALED_MULTIPLE = 16
"""What N and K must be multiples of for `torch._scaled_mm`."""


@dataclass(frozen=True, slots=True)
class PackedFp8:
    """A float8_e4m3fn weight of `shape` [N, K] for activations of `dtype`: its codes and float32 scales [N, 1].

    On a CPU the codes are held as bfloat16 or float32: without instructions for float8, converting them for every
    product was 3 to 8 times slower than bfloat16 weights.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    weight: BlockWeight


def pack_fp8(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> PackedFp8:
    """Lay out the weight `scales · codes` for `fp8_linear`, on the device of the codes.

    codes: float8_e4m3fn [N, K] without NaN; scales: floating point [N, 1]; dtype: of the activations: float32,
    bfloat16 or float16. Raises ValueError naming the argument that is wrong.
    """
    check_codes(codes, scales, None, dtype, torch.float8_e4m3fn)
    rows, columns = codes.shape
    if scales.shape[1] != 1:
        raise ValueError(f"scales must be [{rows}, 1], one an output channel, got {list(scales.shape)}")
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ValueError("codes must not hold NaN")
    weight = block_weight(codes, scales, None, 8, 0.0)
    return PackedFp8((rows, columns), dtype, _widened(weight, dtype) if codes.is_cpu else weight)


def fp8_linear(
    x: torch.Tensor,
    packed: PackedFp8,
    bias: torch.Tensor | None = None,
    activations: Activations = "none",
    input_scale: float | None = None,
) -> torch.Tensor:
    """`x @ weight.T + bias`, x rounded to float8 first unless `activations` is none.

    x: [T, K] of the packed type; bias: [N] of x's type or None; activations: none, dynamic (one scale a row) or static
    (`input_scale`, which the others must leave None). Returns [T, N] of x's type. Raises ValueError naming the argument
    that is wrong.
    """
    check_input(x, bias, *packed.shape, packed.dtype)
    check_input_scale(input_scale)
    if (activations == "static") != (input_scale is not None):
        raise ValueError(f"input_scale must be given with static activations and only then, got {input_scale}")
    if activations == "none":
        return _cpu_linear(x, packed, bias) if x.is_cpu else block_linear(x, packed.weight, bias)
    # Tensor cores sum float8 in 14 bits, too few for float32.
    if len(x) <= _FEW_TOKENS and is_hopper(x.device) and x.dtype != torch.float32:
        from bladellm_kernels.eight_bit_linear import eight_bit_linear

        return eight_bit_linear(x, packed.weight.codes, packed.weight.scales.view(-1), None, bias, input_scale)
    codes, steps = _round_input(x, input_scale)
    if _has_scaled_mm(x, packed):
        return _scaled_mm(codes, steps, packed, bias)
    if x.is_cpu:
        return _cpu_linear(codes.to(torch.float32).to(x.dtype), packed, bias, steps)
    return block_linear((codes.float() * steps).to(x.dtype), packed.weight, bias)


def fp8_linear_reference(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    activations: Activations = "none",
    input_scale: float | None = None,
) -> torch.Tensor:
    """The same from the codes, as `pack_fp8` takes them. Returns float64 [T, N]."""
    rounded = x.double()
    if activations != "none":
        peaks = x.float().abs().amax(dim=1, keepdim=True)
        dynamic = torch.where(peaks == 0, 1.0, exact_quotients(peaks, LARGEST))
        steps = dynamic if input_scale is None else torch.tensor(input_scale, device=x.device)
        rounded = (x.float() / steps).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).double() * steps.double()
    return reference_linear(rounded, codes, scales, None, 0.0, bias)


def _round_input(x: torch.Tensor, input_scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """float8 [T, K] and float32 scales [T, 1]."""
    if input_scale is None:
        steps = row_scales(x.float(), LARGEST)
    else:
        steps = torch.full((len(x), 1), input_scale, device=x.device)
    return (x.float() / steps).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), steps


def _cpu_linear(
    x: torch.Tensor, packed: PackedFp8, bias: torch.Tensor | None, steps: torch.Tensor | None = None
) -> torch.Tensor:
    """`steps · x @ weight.T + bias`, the codes multiplied as they are and the sums scaled."""
    weight = packed.weight
    y = F.linear(x.to(weight.codes.dtype), weight.codes).float().mul_(weight.scales.view(-1))
    if steps is not None:
        y.mul_(steps)
    return (y if bias is None else y.add_(bias)).to(packed.dtype)


def _widened(weight: BlockWeight, dtype: torch.dtype) -> BlockWeight:
    """The weight with its codes as bfloat16 or float32, whichever is multiplied for activations of `dtype`."""
    wide = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    codes = torch.empty(weight.codes.shape, dtype=wide)
    for part in weight_blocks(len(codes), codes.shape[1], codes.device):
        codes[part] = _read_codes(weight.codes[part])
    return replace(weight, codes=codes)


def _read_codes(codes: torch.Tensor) -> torch.Tensor:
    """float8 as bfloat16, exactly.

    PyTorch's own conversion is not vectorised and many times slower. Under the sign the shifted bits of a float8 are a
    bfloat16 whose exponent has another bias; a power of two puts that right, also for subnormal numbers.
    """
    bits = codes.view(torch.int8).to(torch.int16).mul_(2**4).bitwise_and_(-0x7810)
    return bits.view(torch.bfloat16).mul_(2.0**120)


def _has_scaled_mm(x: torch.Tensor, packed: PackedFp8) -> bool:
    """Whether `torch._scaled_mm` takes one scale a row and a column: Hopper and later, bfloat16, sizes of 16."""
    if not x.is_cuda or not hasattr(torch, "_scaled_mm") or x.dtype != torch.bfloat16 or not len(x):
        return False
    fits = all(size % _SCALED_MULTIPLE == 0 for size in packed.shape)
    return fits and is_hopper(x.device)


def _scaled_mm(codes: torch.Tensor, steps: torch.Tensor, packed: PackedFp8, bias: torch.Tensor | None) -> torch.Tensor:
    weight = packed.weight
    y: torch.Tensor = torch._scaled_mm(
        codes, weight.codes.t(), scale_a=steps, scale_b=weight.scales.t().contiguous(), out_dtype=torch.bfloat16
    )
    return y if bias is None else y.add_(bias)
