"""The CUDA kernel of `kv_write` and `rotary_kv_write`: normalise and rotate queries and keys, quantize, store.

A program handles a few heads of a few tokens: of the queries, of the keys, or of the values. Both halves of a head
are tiles of their own, since number i is rotated, and packed, with number i + D/2.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.kv_format import KvFormat
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_quantize import LEAST_NORMAL, MANTISSA
from bladellm_kernels.kv_quantize_triton import float12_bits, quantized
from bladellm_kernels.rotary_kv_write import HeadNorms

TILE_NUMBERS = 512
WARPS = 1
HADAMARD_ROWS = 64
HADAMARD_WARPS = 4
MIN_DOT = 16
_NO_STRIDES = (0,) * 5


@triton.jit  # type: ignore[untyped-decorator]
def load_halves(
    source: tl.tensor, place: tl.tensor, inside: tl.tensor, SHAPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    first = tl.load(source + place, mask=inside, other=0.0)
    return first.to(tl.float32), tl.load(source + place + SHAPE.dim_half, mask=inside, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def store_halves(
    target: tl.tensor,
    place: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    inside: tl.tensor,
    SHAPE: tl.constexpr,
    BITS: tl.constexpr,
) -> None:
    """first, second: float32, numbers or codes of so many bits; 0 are numbers."""
    if BITS == 4:
        tl.store(target + place, first.to(tl.uint8) | (second.to(tl.uint8) << 4), mask=inside)
    elif BITS == 12:
        first_bits, second_bits = float12_bits(first), float12_bits(second)
        tl.store(target + place, first_bits.to(tl.uint8), mask=inside)
        tl.store(target + place + SHAPE.dim_half, second_bits.to(tl.uint8), mask=inside)
        upper = (first_bits >> 8).to(tl.uint8) | ((second_bits >> 8).to(tl.uint8) << 4)
        tl.store(target + place + 2 * SHAPE.dim_half, upper, mask=inside)
    else:
        tl.store(target + place, first.to(target.dtype.element_ty), mask=inside)
        tl.store(target + place + SHAPE.dim_half, second.to(target.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def head_normed(
    first: tl.tensor,
    second: tl.tensor,
    low_factor: tl.tensor,
    high_factor: tl.tensor,
    eps: tl.tensor,
    dtype: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves by the RMS norm of their head, rounded to `dtype`; float32 [tokens, heads, half]."""
    squares = tl.sum(first * first + second * second, axis=2)
    inverse = tl.rsqrt(squares * (0.5 / SHAPE.dim_half) + eps)[:, :, None]
    low, high = (first * inverse * low_factor).to(dtype), (second * inverse * high_factor).to(dtype)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def rotated(
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    table: tl.tensor,
    present: tl.tensor,
    hadamard: tl.tensor,
    hadamard_stride: tl.tensor,
    dtype: tl.constexpr,
    SHAPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Both halves by rotary, rounded to `dtype`, then by the Hadamard matrix, if any; float32 [tokens, heads, half].

    table, present: places in the tables, [tokens, 1, half], and whether they are there.
    """
    low_cos, high_cos = load_halves(cos, table, present, SHAPE)
    low_sin, high_sin = load_halves(sin, table, present, SHAPE)
    low = (first * low_cos + second * low_sin).to(dtype)
    high = (second * high_cos + first * high_sin).to(dtype)
    if hadamard is not None:
        # H = [[A, A], [A, -A]].
        row, column = tl.arange(0, SHAPE.half)[:, None], tl.arange(0, SHAPE.half)[None, :]
        there = (row < SHAPE.dim_half) & (column < SHAPE.dim_half)
        a = tl.load(hadamard + row * hadamard_stride + column, mask=there, other=0.0)
        one = tl.dot(tl.reshape(low, (SHAPE.tokens * SHAPE.heads, SHAPE.half)), a, input_precision="ieee")
        other = tl.dot(tl.reshape(high, (SHAPE.tokens * SHAPE.heads, SHAPE.half)), a, input_precision="ieee")
        low = tl.reshape(((one + other) * SHAPE.root).to(dtype), (SHAPE.tokens, SHAPE.heads, SHAPE.half))
        high = tl.reshape(((one - other) * SHAPE.root).to(dtype), (SHAPE.tokens, SHAPE.heads, SHAPE.half))
    return low.to(tl.float32), high.to(tl.float32)


# fmt: off
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def kv_write_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, q_weight: tl.tensor, k_weight: tl.tensor, cos: tl.tensor,
    sin: tl.tensor, hadamard: tl.tensor, out: tl.tensor, payload: tl.tensor, scales: tl.tensor, rows: tl.tensor,
    granule_rows: tl.tensor, tokens: tl.tensor, eps: tl.tensor,
    q_token_stride: tl.tensor, q_head_stride: tl.tensor, k_token_stride: tl.tensor, k_head_stride: tl.tensor,
    v_token_stride: tl.tensor, v_head_stride: tl.tensor, table_stride: tl.tensor, hadamard_stride: tl.tensor,
    out_token_stride: tl.tensor, out_head_stride: tl.tensor, row_stride: tl.tensor, which_stride: tl.tensor,
    head_stride: tl.tensor, granule_stride: tl.tensor, scale_head_stride: tl.tensor, scale_which_stride: tl.tensor,
    plane_stride: tl.tensor, SHAPE: tl.constexpr, EARLY: tl.constexpr,
) -> None:
    """One program a tile of tokens and heads: blocks of query heads first, then of keys, then of values. SHAPE: a
    `KvWriteShape`. What a call does not have is None. A token whose row is negative is not stored."""
    let_next_start(EARLY)
    block = tl.program_id(0) % SHAPE.blocks
    token = (tl.program_id(0) // SHAPE.blocks).to(tl.int64) * SHAPE.tokens + tl.arange(0, SHAPE.tokens)
    column = tl.arange(0, SHAPE.half)[None, None, :]
    dtype: tl.constexpr = q.dtype.element_ty
    at, real = token[:, None, None], column < SHAPE.dim_half
    here = (token < tokens)[:, None, None] & real
    table = at * table_stride + column
    if block < SHAPE.q_blocks:
        if q_weight is not None:
            low_factor, high_factor = load_halves(q_weight, column, real, SHAPE)
        wait_for_inputs(EARLY)
        head = (block * SHAPE.heads + tl.arange(0, SHAPE.heads)).to(tl.int64)[None, :, None]
        inside = here & (head < SHAPE.q_heads)
        first, second = load_halves(q, at * q_token_stride + head * q_head_stride + column, inside, SHAPE)
        if q_weight is not None:
            first, second = head_normed(first, second, low_factor, high_factor, eps, dtype, SHAPE)
        first, second = rotated(first, second, cos, sin, table, here, hadamard, hadamard_stride, dtype, SHAPE)
        place = at * out_token_stride + head * out_head_stride + column
        store_halves(out, place, first, second, inside, SHAPE, 0)
    else:
        which = (block >= SHAPE.q_blocks + SHAPE.kv_blocks).to(tl.int64)
        vector = (block - SHAPE.q_blocks - which * SHAPE.kv_blocks) * SHAPE.heads + tl.arange(0, SHAPE.heads)
        head = vector[None, :, None]
        inside = here & (head < SHAPE.kv_heads)
        if k_weight is not None:
            low_factor, high_factor = load_halves(k_weight, column, real, SHAPE)
        wait_for_inputs(EARLY)
        row = tl.load(rows + token, mask=token < tokens, other=-1)
        if which == 0:
            first, second = load_halves(k, at * k_token_stride + head * k_head_stride + column, inside, SHAPE)
            if k_weight is not None:
                first, second = head_normed(first, second, low_factor, high_factor, eps, dtype, SHAPE)
            if SHAPE.q_heads > 0:
                first, second = rotated(first, second, cos, sin, table, here, hadamard, hadamard_stride, dtype, SHAPE)
            if SHAPE.keeps_keys:
                store_halves(k, at * k_token_stride + head * k_head_stride + column, first, second, inside, SHAPE, 0)
        else:
            first, second = load_halves(v, at * v_token_stride + head * v_head_stride + column, inside, SHAPE)
        if SHAPE.quantized:
            granule_row = tl.load(granule_rows + token, mask=row >= 0, other=0)
            granule = (granule_row // SHAPE.granule * granule_stride + granule_row % SHAPE.granule)[:, None]
            place = granule + vector[None, :] * scale_head_stride + which * scale_which_stride
            written = (row >= 0)[:, None] & (vector < SHAPE.kv_heads)[None, :]
            first, second = quantized(first, second, scales, place, plane_stride, real, written, SHAPE)
        place = row[:, None, None] * row_stride + which * which_stride + head * head_stride + column
        store_halves(payload, place, first, second, inside & (row >= 0)[:, None, None], SHAPE, SHAPE.bits)
# fmt: on


@dataclass(frozen=True, eq=False)
class KvWriteShape:
    """The kernel's constants: one of them for all calls of its kind, since each launch hashes it.

    q_heads, kv_heads: of a token. dim_half, half: numbers in half a head, and the power of two that holds them. tokens,
    heads: of a program. bits: of a code, 0 unquantized. lowest, highest, offset: of the format's codes. floats: codes
    are floats; least, unit: as `nearest_float` takes them. root: 1 / √D. granule: its tokens. keeps_keys: turned
    ones are written where they came from, too. q_blocks, kv_blocks, blocks: programs for the queries, the keys or the
    values, and all of them, of as many tokens as a program has.
    """

    q_heads: int
    kv_heads: int
    dim_half: int
    half: int
    tokens: int
    heads: int
    quantized: bool
    affine: bool
    bits: int
    floats: bool
    lowest: float
    highest: float
    offset: float
    least: float
    unit: float
    root: float
    granule: int
    keeps_keys: bool
    q_blocks: int
    kv_blocks: int
    blocks: int


@cache
def kv_write_shape(
    format: KvFormat,
    kv_heads: int,
    dim: int,
    granule: int,
    q_heads: int,
    hadamard: bool,
    tile: int,
    keeps_keys: bool = False,
) -> KvWriteShape:
    """tile: how many numbers of a half a program holds of a token."""
    least, mantissa = float_codes(format)
    half = max(triton.next_power_of_2(dim // 2), MIN_DOT if hadamard else 1)
    heads = min(max(1, tile // half), triton.next_power_of_2(max(q_heads, kv_heads)))
    q_blocks, kv_blocks = triton.cdiv(q_heads, heads), triton.cdiv(kv_heads, heads)
    return KvWriteShape(
        q_heads, kv_heads, dim // 2, half,
        tokens=max(1, HADAMARD_ROWS // heads) if hadamard else 1, heads=heads,
        quantized=format.quantized, affine=format.affine,
        bits=format.bits if format.quantized else 0, floats=mantissa > 0,
        lowest=float(format.lowest), highest=float(format.highest), offset=float(format.offset),
        least=least, unit=1.5 * 2.0 ** (23 - mantissa),
        root=float(dim**-0.5), granule=granule, keeps_keys=keeps_keys,
        q_blocks=q_blocks, kv_blocks=kv_blocks, blocks=q_blocks + 2 * kv_blocks,
    )  # fmt: skip


def float_codes(format: KvFormat) -> tuple[float, int]:
    """The least normal number and the bits of the mantissa of codes; 0 where these are integers."""
    if format.float12:
        return LEAST_NORMAL, MANTISSA
    if format.storage is None or not format.storage.is_floating_point:
        return 0.0, 0
    float8 = torch.finfo(format.storage)
    return float8.smallest_normal, -int(math.log2(float8.eps))


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
    launch_rotary_kv_write(none, k, v, None, none, none, kv, rows, granule_rows, None, none, False, tile, warps)


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
    keep_keys: bool = False,
    tile: int = TILE_NUMBERS,
    warps: int | None = None,
) -> None:
    """`rotary_kv_write` by one kernel; the arguments have been checked."""
    tokens, q_heads, dim = q.shape
    if tokens == 0:
        return
    payload, scales, rotates = kv.payload, kv.scales, hadamard is not None
    shape = kv_write_shape(kv.format, payload.shape[2], dim, kv.granule_tokens, q_heads, rotates, tile, keep_keys)
    granule, scale_head, scale_which, plane, _ = _NO_STRIDES if scales is None else scales.stride()
    q_token, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    out_token, out_head, _ = out.stride()
    row, which, head, _ = payload.stride()
    kv_write_kernel[(-(-tokens // shape.tokens) * shape.blocks,)](
        q, k, v, None if norms is None else norms.q_weight, None if norms is None else norms.k_weight,
        cos, sin, hadamard, out, payload, scales, rows, granule_rows, tokens, 0.0 if norms is None else norms.eps,
        q_token, q_head, k_token, k_head, v_token, v_head,
        cos.stride(0), hadamard.stride(0) if hadamard is not None else 0, out_token, out_head,
        row, which, head, granule, scale_head, scale_which, plane, shape,
        num_warps=warps or (HADAMARD_WARPS if rotates else WARPS),
        # Products are rounded before they are added, as in PyTorch: the same codes.
        enable_fp_fusion=False,
        **early_launch(q.device),
    )  # fmt: skip
