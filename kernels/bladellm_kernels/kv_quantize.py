"""Round keys and values to a KV format: one scale, and zero where the format is affine, for the D numbers of a head.

Scale and zero are float16 first, rounded outwards, so that every number lies between the lowest and the highest code:
none is further than half a step from its code, unless it is beyond what float16 scales can reach, where it saturates.
A scale of `fp12_e4m7` is the power of two at or below the largest number.
"""

import torch

from bladellm_kernels.kv_format import KvFormat

FLOAT16_MAX = 65504.0
LEAST_POWER, MOST_POWER = 2.0**-24, 2.0**15
"""Powers of two that float16 has."""
LEAST_NORMAL, MANTISSA = 2.0**-14, 7
"""Of `fp12_e4m7`."""


def kv_quantize(x: torch.Tensor, format: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D] of a float type -> codes [..., W] of `format.storage` and scales, float16 [..., planes].

    Halves round to even. Symmetric: scale = max |x| / highest level. Affine: zero = min x, scale = (max x - zero) /
    highest code. `fp12_e4m7`: scale = 2^e <= max |x| < 2^(e + 1), where max |x| is rounded to 8 bits. Zeros get scale
    0. Infinities saturate; a NaN makes scales NaN, so the whole head reads back as NaN. Raises `ValueError` for an
    unquantized format and for an odd D where two numbers share a byte. Every step is exact or correctly rounded in
    float32: devices and the CUDA kernel of `kv_write` give the same bits.
    """
    if format.storage is None:
        raise ValueError(f"the KV format {format.name} stores numbers as they are")
    if x.shape[-1] % format.multiple:
        raise ValueError(f"the KV format {format.name} needs an even head size, got {x.shape[-1]}")
    x = x.float()
    zero = _float16_below(x.amin(-1, keepdim=True)) if format.affine else None
    levels = x if zero is None else x - zero.float()
    span = x.abs().amax(-1, keepdim=True) if zero is None else levels.amax(-1, keepdim=True)
    if format.float12:
        scale = _power_below(span)
    else:
        # By a tensor: a division by a number is a multiplication by its reciprocal on CUDA.
        scale = _float16_above(span / span.new_full((), format.highest - format.offset))
    codes = _codes(levels, scale.float(), format)
    return codes, scale if zero is None else torch.cat((scale, zero), -1)


def _codes(levels: torch.Tensor, scale: torch.Tensor, format: KvFormat) -> torch.Tensor:
    """levels: x less its zero."""
    # By the reciprocal, as divisions are slow. The bounds are whole numbers: saturating before rounding gives the same
    # codes. NaN, as from zeros with scale 0, gets the code of 0.
    steps = levels * scale.reciprocal()
    steps = torch.where(steps.isnan(), 0.0, steps).clamp(format.lowest - format.offset, format.highest - format.offset)
    if format.storage is None or format.storage.is_floating_point:
        return steps.to(format.storage)
    if format.float12:
        return _float12(steps)
    codes = (steps.round() + format.offset).to(format.storage)
    return _in_bytes(codes) if format.nibbles else codes


def _in_bytes(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, two to a byte."""
    low, high = codes.chunk(2, -1)
    return low | high << 4


def _float12(steps: torch.Tensor) -> torch.Tensor:
    """float32 within the range of `fp12_e4m7` -> its codes, uint8 [..., W]."""
    # Times its power of two, or that of the least normal number, this has neighbours as far apart as codes are there.
    power = (steps.view(torch.int32) & 0x7F800000).view(torch.float32)
    unit = power.clamp(min=LEAST_NORMAL) * (1.5 * 2 ** (23 - MANTISSA))
    rounded = torch.copysign((steps.abs() + unit) - unit, steps)
    bits = rounded.half().view(torch.int16).int()
    lower = (bits >> 3 & 255).to(torch.uint8)
    upper = ((bits >> 11 & 7) | (bits >> 15 & 1) << 3).to(torch.uint8)
    return torch.cat((lower, _in_bytes(upper)), -1)


def _power_below(x: torch.Tensor) -> torch.Tensor:
    """The power of two at or below x >= 0, rounded to 8 bits first, or the nearest one that float16 has; 0 and NaN as
    they are; float16."""
    power = (x.view(torch.int32) + 0x8000 & 0x7F800000).view(torch.float32).clamp(LEAST_POWER, MOST_POWER)
    return torch.where((x == 0) | x.isnan(), x, power).half()


def _float16_above(x: torch.Tensor) -> torch.Tensor:
    """The least float16 that is not below x >= 0; the largest finite one where there is none."""
    # Which of 0 and -0 is the larger is anybody's choice: adding 0 leaves only one.
    x = x.clamp(max=FLOAT16_MAX) + 0.0
    near = x.half()
    return (near.view(torch.int16) + (near.float() < x).short()).view(torch.float16)


def _float16_below(x: torch.Tensor) -> torch.Tensor:
    """The largest float16 that is not above x; the lowest finite one where there is none."""
    x = x.clamp(-FLOAT16_MAX, FLOAT16_MAX) + 0.0
    near = x.half()
    bits = near.view(torch.int16)
    # Bits count magnitudes: down to zero for a positive number, up for a negative one and the -0 it may have become.
    return torch.where(near.float() > x, bits + torch.where(bits > 0, -1, 1).short(), bits).view(torch.float16)
