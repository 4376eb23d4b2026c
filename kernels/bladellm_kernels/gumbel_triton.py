"""The noise of `gumbel` inside CUDA kernels: the same words, and on one device the same float32 logarithms as PyTorch.

Kernels that use it are compiled without fused products and with subnormal numbers, as PyTorch's are (`EXACT`).
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from bladellm_kernels import gumbel

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Launch options."""

_M1 = tl.constexpr(gumbel.M1)
_M2 = tl.constexpr(gumbel.M2)
_STEP_0 = tl.constexpr(gumbel.STEPS[0])
_STEP_1 = tl.constexpr(gumbel.STEPS[1])
_TOKEN_STEP = tl.constexpr(gumbel.TOKEN_STEP)
_LOWEST = tl.constexpr(-gumbel.UNIFORM_MAX)
_UNIT = tl.constexpr(2.0**-31)
_HALF_UNIT = tl.constexpr(2.0**-32)
_LOG_2 = tl.constexpr(0.6931471805599453)
_ULP = tl.constexpr(2.0**-23)
_ROUNDING_SLACK = tl.constexpr(1e-3)


@triton.jit  # type: ignore[untyped-decorator]
def row_keys(streams: tl.tensor, slot: tl.tensor, position: tl.tensor) -> tl.tensor:
    """The two words of the draw at `position` in the stream of `slot`."""
    word_0 = tl.load(streams + slot * 2).to(tl.uint32, bitcast=True) + position.to(tl.uint32) * _STEP_0
    word_1 = tl.load(streams + slot * 2 + 1).to(tl.uint32, bitcast=True) + position.to(tl.uint32) * _STEP_1
    return _mix(word_0), _mix(word_1)


@triton.jit  # type: ignore[untyped-decorator]
def negative_uniforms(token: tl.tensor, key_0: tl.tensor, key_1: tl.tensor) -> tl.tensor:
    """-uniform of each token, float32 in (-1, 0)."""
    word = token.to(tl.uint32) * _TOKEN_STEP + key_0
    word = (word ^ (word >> 16)) * _M1 + key_1
    word = (word ^ (word >> 15)) * _M2
    bits = (word ^ (word >> 16)) & 0x7FFFFFFF
    return tl.maximum(bits.to(tl.int32).to(tl.float32) * -_UNIT - _HALF_UNIT, _LOWEST)


@triton.jit  # type: ignore[untyped-decorator]
def noisy(logits: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """Logits plus the noise of `negative_uniforms`."""
    return logits - libdevice.log(-libdevice.log1p(negative))


@triton.jit  # type: ignore[untyped-decorator]
def noisy_bound(logits: tl.tensor, negative: tl.tensor) -> tl.tensor:
    """What `noisy` never exceeds, without a logarithm.

    With u = 2^e (1 + f): -log1p(-u) >= u, and log2(u) >= e + f, which are the bits of u as a number.
    """
    bits = (-negative).to(tl.int32, bitcast=True).to(tl.float32)
    return logits + ((127.0 - bits * _ULP) * _LOG_2 + _ROUNDING_SLACK)


@triton.jit  # type: ignore[untyped-decorator]
def _mix(word: tl.tensor) -> tl.tensor:
    word = (word ^ (word >> 16)) * _M1
    word = (word ^ (word >> 15)) * _M2
    return word ^ (word >> 16)
