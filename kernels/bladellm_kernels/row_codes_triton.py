"""Rounding a row to 8 bits inside a kernel that has it in registers; the same codes as `row_codes`."""

import triton
import triton.language as tl

from bladellm_kernels.kv_quantize_triton import nearest_float

_TINY = tl.constexpr(2.0**-126)
"""The least normal float32."""


@triton.jit  # type: ignore[untyped-decorator]
def store_row_codes(
    row: tl.tensor,
    codes: tl.tensor,
    scale_at: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    LARGEST: tl.constexpr,
) -> None:
    """Store a row's codes and its scale.

    row: float32 [BLOCK], 0 where not inside; codes: where the row's codes go, int8 or float8; scale_at: float32.
    """
    # As whole numbers, magnitudes keep their order and NaN is the largest: a NaN spoils the scale, as it should.
    peak = tl.max(row.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(peak, LARGEST + tl.zeros_like(peak))
    scale = tl.where(scale < _TINY, _TINY, scale)
    tl.store(scale_at, scale)
    # Correctly rounded quotients by one division: what a product with the reciprocal leaves is divided once more.
    inverse = tl.div_rn(1.0 + tl.zeros_like(scale), scale)
    steps = row * inverse
    steps = tl.fma(tl.fma(-steps, scale + tl.zeros_like(row), row), inverse + tl.zeros_like(row), steps)
    if codes.dtype.element_ty == tl.int8:
        # Floats near 1.5 · 2^23 are whole numbers: adding rounds, halves to even, and leaves the code in the low byte.
        tl.store(codes + column, (steps + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8), mask=inside)
    else:
        steps = tl.where(steps > LARGEST, LARGEST, tl.where(steps < -LARGEST, -LARGEST, steps))
        steps = nearest_float(steps, 2.0**-6, 1.5 * 2**20)
        tl.store(codes + column, steps.to(codes.dtype.element_ty), mask=inside)
