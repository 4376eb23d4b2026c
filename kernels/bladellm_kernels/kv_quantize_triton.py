"""`kv_quantize` inside a kernel: the same scales, zeros and codes, of heads whose halves are tiles of their own.

SHAPE is the kernel's `KvWriteShape`.
"""

import triton
import triton.language as tl

from bladellm_kernels.kv_quantize import LEAST_POWER, MOST_POWER

_LEAST, _MOST = tl.constexpr(LEAST_POWER), tl.constexpr(MOST_POWER)


@triton.jit  # type: ignore[untyped-decorator]
def float16_above(x: tl.tensor) -> tl.tensor:
    """As in `kv_quantize`, and so is the next. Adding 0 leaves no -0."""
    x = tl.where(x > 65504.0, 65504.0, x) + 0.0
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    return (bits + (near.to(tl.float32) < x).to(tl.int16)).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def float16_below(x: tl.tensor) -> tl.tensor:
    x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x)) + 0.0
    near = x.to(tl.float16)
    bits = near.to(tl.int16, bitcast=True)
    step = (near.to(tl.float32) > x).to(tl.int16)
    return tl.where(bits > 0, bits - step, bits + step).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def power_below(x: tl.tensor) -> tl.tensor:
    """As in `kv_quantize`."""
    power = ((x.to(tl.int32, bitcast=True) + 0x8000) & 0x7F800000).to(tl.float32, bitcast=True)
    power = tl.minimum(tl.maximum(power, _LEAST), _MOST)
    return tl.where((x == 0.0) | (x != x), x, power).to(tl.float16)


@triton.jit  # type: ignore[untyped-decorator]
def float12_bits(codes: tl.tensor) -> tl.tensor:
    """Codes of `fp12_e4m7`, int32: in float16 bit 14 and bits 2..0 are zeros; the sign comes next to the exponent."""
    bits = codes.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    return ((bits >> 3) & 0x7FF) | ((bits >> 4) & 0x800)


@triton.jit  # type: ignore[untyped-decorator]
def span_and_zero(
    first: tl.tensor, second: tl.tensor, inside: tl.tensor, SHAPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What the codes have to cover, float32 [tokens, heads], and from where, float16. inside: [1, 1, half]."""
    # As whole numbers, magnitudes keep their order and NaN is the largest.
    one, other = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    span = tl.max(tl.maximum(one & 0x7FFFFFFF, other & 0x7FFFFFFF), axis=2).to(tl.float32, bitcast=True)
    zero = span.to(tl.float16)
    if SHAPE.affine:
        nan = span != span
        low = tl.min(tl.where(inside, tl.minimum(first, second), float("inf")), axis=2)
        high = tl.max(tl.where(inside, tl.maximum(first, second), float("-inf")), axis=2)
        zero = tl.where(nan, zero, float16_below(low))
        span = tl.where(nan, span, high - zero.to(tl.float32))
    return span, zero


@triton.jit  # type: ignore[untyped-decorator]
def nearest_float(steps: tl.tensor, LEAST: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Numbers within a small float's range rounded to it, halves to even, since not every cast does.

    LEAST is its least normal number, UNIT 1.5 · 2^(23 - bits of its mantissa): times the power of two at or below a
    number, UNIT has neighbours as far apart as that float has there.
    """
    bits = steps.to(tl.uint32, bitcast=True)
    unit = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), LEAST) * UNIT
    rounded = ((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) + unit) - unit
    return (rounded.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def codes_of(levels: tl.tensor, inverse: tl.tensor, SHAPE: tl.constexpr) -> tl.tensor:
    """float32 [tokens, heads, half], as `kv_quantize` makes them; levels are numbers less their zero."""
    steps = levels * inverse[:, :, None]
    steps = tl.where(steps == steps, steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, SHAPE.lowest - SHAPE.offset), SHAPE.highest - SHAPE.offset)
    if SHAPE.floats:
        steps = nearest_float(steps, SHAPE.least, SHAPE.unit)
    else:
        # Floats near 1.5 · 2^23 are whole numbers: adding rounds, halves to even.
        steps = ((steps + 12582912.0) - 12582912.0) + SHAPE.offset
    return steps


@triton.jit  # type: ignore[untyped-decorator]
def quantized(
    first: tl.tensor,
    second: tl.tensor,
    scales: tl.tensor,
    place: tl.tensor,
    plane_stride: tl.tensor,
    inside: tl.tensor,
    written: tl.tensor,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Codes of both halves, float32; stores scale and zero at `place` [tokens, heads] where `written`."""
    span, zero = span_and_zero(first, second, inside, SHAPE)
    if SHAPE.bits == 12:
        scale = power_below(span)
    else:
        scale = float16_above(tl.div_rn(span, tl.full(span.shape, SHAPE.highest - SHAPE.offset, tl.float32)))
    tl.store(scales + place, scale, mask=written)
    if SHAPE.affine:
        tl.store(scales + place + plane_stride, zero, mask=written)
        first -= zero.to(tl.float32)[:, :, None]
        second -= zero.to(tl.float32)[:, :, None]
    inverse = tl.div_rn(tl.full(span.shape, 1.0, tl.float32), scale.to(tl.float32))
    return codes_of(first, inverse, SHAPE), codes_of(second, inverse, SHAPE)
