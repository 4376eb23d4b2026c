"""The CUDA kernel of `kv_write` and `rotary_kv_write`: normalise and rotate queries and keys, quantize, store.

A program handles a few heads of a few tokens: of the queries, of the keys, or of the values. Both halves of a head
are tiles of their own, since number i is rotated, and packed, with number i + D/2.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.kv_format import KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.rotary_kv_write import HeadNorms

TILE_NUMBERS = 512
WARPS = 1
HADAMARD_ROWS = 64
HADAMARD_WARPS = 4
MIN_DOT = 16
_NO_STRIDES = (0,) * 5


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
def span_and_zero(
    first: tl.tensor, second: tl.tensor, inside: tl.tensor, AFFINE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """What the codes have to cover, float32 [TOKENS, HEADS], and from where, float16. inside: [1, 1, HALF]."""
    # As whole numbers, magnitudes keep their order and NaN is the largest.
    one, other = first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)
    span = tl.max(tl.maximum(one & 0x7FFFFFFF, other & 0x7FFFFFFF), axis=2).to(tl.float32, bitcast=True)
    zero = span.to(tl.float16)
    if AFFINE:
        nan = span != span
        low = tl.min(tl.where(inside, tl.minimum(first, second), float("inf")), axis=2)
        high = tl.max(tl.where(inside, tl.maximum(first, second), float("-inf")), axis=2)
        zero = tl.where(nan, zero, float16_below(low))
        span = tl.where(nan, span, high - zero.to(tl.float32))
    return span, zero


@triton.jit  # type: ignore[untyped-decorator]
def nearest_float8(steps: tl.tensor, LEAST: tl.constexpr, UNIT: tl.constexpr) -> tl.tensor:
    """Numbers within a float8's range rounded to it, halves to even, since not every cast to float8 does.

    LEAST is its least normal number, UNIT 1.5 · 2^(23 - bits of its mantissa): times the power of two at or below a
    number, UNIT has neighbours as far apart as float8 has there.
    """
    bits = steps.to(tl.uint32, bitcast=True)
    unit = tl.maximum((bits & 0x7F800000).to(tl.float32, bitcast=True), LEAST) * UNIT
    rounded = ((bits & 0x7FFFFFFF).to(tl.float32, bitcast=True) + unit) - unit
    return (rounded.to(tl.uint32, bitcast=True) | (bits & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def codes_of(
    levels: tl.tensor,
    inverse: tl.tensor,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    OFFSET: tl.constexpr,
    FP8: tl.constexpr,
    LEAST: tl.constexpr,
    UNIT: tl.constexpr,
) -> tl.tensor:
    """float32 [TOKENS, HEADS, HALF], as `kv_quantize` makes them; levels are numbers less their zero."""
    steps = levels * inverse[:, :, None]
    steps = tl.where(steps == steps, steps, 0.0)
    steps = tl.minimum(tl.maximum(steps, LOWEST - OFFSET), HIGHEST - OFFSET)
    if FP8:
        steps = nearest_float8(steps, LEAST, UNIT)
    else:
        # Floats near 1.5 · 2^23 are whole numbers: adding rounds, halves to even.
        steps = ((steps + 12582912.0) - 12582912.0) + OFFSET
    return steps


@triton.jit  # type: ignore[untyped-decorator]
def load_halves(
    source: tl.tensor, place: tl.tensor, inside: tl.tensor, DIM_HALF: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    first = tl.load(source + place, mask=inside, other=0.0)
    return first.to(tl.float32), tl.load(source + place + DIM_HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def store_halves(
    target: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    inside: tl.tensor,
    DIM_HALF: tl.constexpr,
    PACKED: tl.constexpr,
) -> None:
    """first, second: float32, numbers or codes."""
    if PACKED:
        tl.store(target + place, first.to(tl.uint8) | (second.to(tl.uint8) << 4), mask=inside)
    else:
        tl.store(target + place, first.to(target.dtype.element_ty), mask=inside)
        tl.store(target + place + DIM_HALF, second.to(target.dtype.element_ty), mask=inside)


# fmt: off
@triton.jit  # type: ignore[untyped-decorator]
def head_normed(
    first: tl.tensor, second: tl.tensor, low_factor: tl.tensor, high_factor: tl.tensor, eps: tl.tensor,
    dtype: tl.constexpr, DIM_HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves by the RMS norm of their head, rounded to `dtype`; float32 [TOKENS, HEADS, HALF]."""
    squares = tl.sum(first * first + second * second, axis=2)
    inverse = tl.rsqrt(squares * (0.5 / DIM_HALF) + eps)[:, :, None]
    low, high = (first * inverse * low_factor).to(dtype), (second * inverse * high_factor).to(dtype)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def rotated(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, table: tl.tensor, present: tl.tensor,
    hadamard: tl.tensor, hadamard_stride: tl.tensor, dtype: tl.constexpr, DIM_HALF: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, HADAMARD: tl.constexpr, ROOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves by rotary, rounded to `dtype`, then by the Hadamard matrix; float32 [TOKENS, HEADS, HALF].

    table, present: places in the tables, [TOKENS, 1, HALF], and whether they are there.
    """
    low_cos = tl.load(cos + table, mask=present, other=0.0)
    high_cos = tl.load(cos + table + DIM_HALF, mask=present, other=0.0)
    low_sin = tl.load(sin + table, mask=present, other=0.0)
    high_sin = tl.load(sin + table + DIM_HALF, mask=present, other=0.0)
    low = (first * low_cos + second * low_sin).to(dtype)
    high = (second * high_cos + first * high_sin).to(dtype)
    if HADAMARD:
        # H = [[A, A], [A, -A]].
        row, column = tl.arange(0, HALF)[:, None], tl.arange(0, HALF)[None, :]
        there = (row < DIM_HALF) & (column < DIM_HALF)
        a = tl.load(hadamard + row * hadamard_stride + column, mask=there, other=0.0)
        one = tl.dot(tl.reshape(low, (TOKENS * HEADS, HALF)), a, input_precision="ieee")
        other = tl.dot(tl.reshape(high, (TOKENS * HEADS, HALF)), a, input_precision="ieee")
        low = tl.reshape(((one + other) * ROOT).to(dtype), (TOKENS, HEADS, HALF))
        high = tl.reshape(((one - other) * ROOT).to(dtype), (TOKENS, HEADS, HALF))
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def quantized(
    first: tl.tensor, second: tl.tensor, scales: tl.tensor, place: tl.tensor, plane_stride: tl.tensor,
    inside: tl.tensor, written: tl.tensor, AFFINE: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    OFFSET: tl.constexpr, FP8: tl.constexpr, LEAST: tl.constexpr, UNIT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Codes of both halves, float32; stores scale and zero at `place` [TOKENS, HEADS] where `written`."""
    span, zero = span_and_zero(first, second, inside, AFFINE)
    scale = float16_above(tl.div_rn(span, tl.full(span.shape, HIGHEST - OFFSET, tl.float32)))
    tl.store(scales + place, scale, mask=written)
    if AFFINE:
        tl.store(scales + place + plane_stride, zero, mask=written)
        first -= zero.to(tl.float32)[:, :, None]
        second -= zero.to(tl.float32)[:, :, None]
    inverse = tl.div_rn(tl.full(span.shape, 1.0, tl.float32), scale.to(tl.float32))
    first = codes_of(first, inverse, LOWEST, HIGHEST, OFFSET, FP8, LEAST, UNIT)
    return first, codes_of(second, inverse, LOWEST, HIGHEST, OFFSET, FP8, LEAST, UNIT)


@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def kv_write_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, hadamard: tl.tensor, out: tl.tensor, payload: tl.tensor, scales: tl.tensor, rows: tl.tensor,
    granule_rows: tl.tensor, tokens: tl.tensor, eps: tl.tensor,
    q_token_stride: tl.tensor, q_head_stride: tl.tensor, k_token_stride: tl.tensor, k_head_stride: tl.tensor,
    v_token_stride: tl.tensor, v_head_stride: tl.tensor, table_stride: tl.tensor, hadamard_stride: tl.tensor,
    out_token_stride: tl.tensor, out_head_stride: tl.tensor, row_stride: tl.tensor, which_stride: tl.tensor,
    head_stride: tl.tensor, granule_stride: tl.tensor, scale_head_stride: tl.tensor, scale_which_stride: tl.tensor,
    plane_stride: tl.tensor,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM_HALF: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
    HEADS: tl.constexpr, ROTARY: tl.constexpr, HADAMARD: tl.constexpr, ROOT: tl.constexpr, QUANTIZED: tl.constexpr,
    AFFINE: tl.constexpr, PACKED: tl.constexpr, FP8: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
    OFFSET: tl.constexpr, LEAST: tl.constexpr, UNIT: tl.constexpr, GRANULE: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """One program a tile of tokens and heads: blocks of query heads first, then of keys, then of values.

    q_weight and k_weight are None where heads are not normalised. A token whose row is negative is not stored.
    """
    let_next_start(EARLY)
    Q_BLOCKS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    KV_BLOCKS: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    BLOCKS: tl.constexpr = Q_BLOCKS + 2 * KV_BLOCKS
    block = tl.program_id(0) % BLOCKS
    token = (tl.program_id(0) // BLOCKS).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, HALF)[None, None, :]
    at, here = token[:, None, None], (token < tokens)[:, None, None] & (column < DIM_HALF)
    table = at * table_stride + column
    if block < Q_BLOCKS:
        if q_weight is not None:
            low_factor, high_factor = load_halves(q_weight, column, column < DIM_HALF, DIM_HALF)
        wait_for_inputs(EARLY)
        head = (block * HEADS + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]
        inside = here & (head < Q_HEADS)
        first, second = load_halves(q, at * q_token_stride + head * q_head_stride + column, inside, DIM_HALF)
        if q_weight is not None:
            first, second = head_normed(first, second, low_factor, high_factor, eps, q.dtype.element_ty, DIM_HALF)
        first, second = rotated(first, second, cos, sin, table, here, hadamard, hadamard_stride, q.dtype.element_ty,
                                DIM_HALF, TOKENS, HEADS, HALF, HADAMARD, ROOT)
        place = at * out_token_stride + head * out_head_stride + column
        store_halves(out, place, first, second, inside, DIM_HALF, False)
    else:
        which = (block >= Q_BLOCKS + KV_BLOCKS).to(tl.int64)
        vector = (block - Q_BLOCKS - which * KV_BLOCKS) * HEADS + tl.arange(0, HEADS)
        head = vector[None, :, None]
        inside = here & (head < KV_HEADS)
        if k_weight is not None:
            low_factor, high_factor = load_halves(k_weight, column, column < DIM_HALF, DIM_HALF)
        wait_for_inputs(EARLY)
        row = tl.load(rows + token, mask=token < tokens, other=-1)
        if which == 0:
            first, second = load_halves(k, at * k_token_stride + head * k_head_stride + column, inside, DIM_HALF)
            if k_weight is not None:
                first, second = head_normed(first, second, low_factor, high_factor, eps, k.dtype.element_ty, DIM_HALF)
            if ROTARY:
                first, second = rotated(first, second, cos, sin, table, here, hadamard, hadamard_stride,
                                        k.dtype.element_ty, DIM_HALF, TOKENS, HEADS, HALF, HADAMARD, ROOT)
        else:
            first, second = load_halves(v, at * v_token_stride + head * v_head_stride + column, inside, DIM_HALF)
        if QUANTIZED:
            granule_row = tl.load(granule_rows + token, mask=row >= 0, other=0)
            granule = (granule_row // GRANULE * granule_stride + granule_row % GRANULE)[:, None]
            place = granule + vector[None, :] * scale_head_stride + which * scale_which_stride
            written = (row >= 0)[:, None] & (vector < KV_HEADS)[None, :]
            first, second = quantized(first, second, scales, place, plane_stride, column < DIM_HALF, written,
                                      AFFINE, LOWEST, HIGHEST, OFFSET, FP8, LEAST, UNIT)
        stored = row[:, None, None]
        place = stored * row_stride + which * which_stride + head * head_stride + column
        store_halves(payload, place, first, second, inside & (stored >= 0), DIM_HALF, PACKED)
# fmt: on


@cache
def constants_of(
    format: KvFormat, kv_heads: int, dim: int, granule_tokens: int, q_heads: int, hadamard: bool, tile: int
) -> dict[str, int | float | bool]:
    """The kernel's constants in its order, but EARLY; `tile` is how many numbers of a half a program holds of a token.

    Made once for all calls of its kind.
    """
    float8 = torch.finfo(format.storage) if format.storage is not None and format.storage.is_floating_point else None
    half = max(triton.next_power_of_2(dim // 2), MIN_DOT if hadamard else 1)
    heads = min(max(1, tile // half), triton.next_power_of_2(max(q_heads, kv_heads)))
    return {
        "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "DIM_HALF": dim // 2, "HALF": half,
        "TOKENS": max(1, HADAMARD_ROWS // heads) if hadamard else 1, "HEADS": heads,
        "ROTARY": q_heads > 0, "HADAMARD": hadamard, "ROOT": float(dim**-0.5),
        "QUANTIZED": format.quantized, "AFFINE": format.affine, "PACKED": format.per_element == 2,
        "FP8": float8 is not None, "LOWEST": float(format.lowest), "HIGHEST": float(format.highest),
        "OFFSET": float(format.offset), "LEAST": float8.smallest_normal if float8 else 0.0,
        "UNIT": 1.5 * 2**23 * float8.eps if float8 else 0.0, "GRANULE": granule_tokens,
    }  # fmt: skip


def launch_kv_write(
    kv: KvLayer,
    rows: torch.Tensor,
    granule_rows: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    tile: int = TILE_NUMBERS,
    warps: int = WARPS,
) -> None:
    """`kv_write` by one kernel; the arguments have been checked."""
    # Queries and tables of no heads are never read.
    none = k[:, :0]
    launch_rotary_kv_write(none, k, v, None, none, none, kv, rows, granule_rows, None, none, tile, warps)


def launch_rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    norms: HeadNorms | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KvLayer,
    rows: torch.Tensor,
    granule_rows: torch.Tensor | None,
    hadamard: torch.Tensor | None,
    out: torch.Tensor,
    tile: int = TILE_NUMBERS,
    warps: int | None = None,
) -> None:
    """`rotary_kv_write` by one kernel; the arguments have been checked."""
    tokens, q_heads, dim = q.shape
    if tokens == 0:
        return
    payload, scales, rotates = kv.payload, kv.scales, hadamard is not None
    kv_heads = payload.shape[2]
    constants = constants_of(kv.format, kv_heads, dim, kv.granule_tokens, q_heads, rotates, tile)
    heads = constants["HEADS"]
    blocks = -(-q_heads // heads) - 2 * (-kv_heads // heads)
    granule, scale_head, scale_which, plane, _ = _NO_STRIDES if scales is None else scales.stride()
    q_token, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    out_token, out_head, _ = out.stride()
    row, which, head, _ = payload.stride()
    kv_write_kernel[(-(-tokens // constants["TOKENS"]) * blocks,)](
        q, k, v, None if norms is None else norms.q_weight, None if norms is None else norms.k_weight,
        cos, sin, hadamard, out, payload, scales, rows, granule_rows, tokens, 0.0 if norms is None else norms.eps,
        q_token, q_head, k_token, k_head, v_token, v_head,
        cos.stride(0), hadamard.stride(0) if hadamard is not None else 0, out_token, out_head,
        row, which, head, granule, scale_head, scale_which, plane,
        *constants.values(),
        num_warps=warps or (HADAMARD_WARPS if rotates else WARPS),
        # Products are rounded before they are added, as in PyTorch: the same codes.
        enable_fp_fusion=False,
        **early_launch(q.device),
    )  # fmt: skip
