"""Turn stored KV codes into numbers inside a kernel.

Kernels read quantized memory in *units* of two bytes: shared memory is transposed in steps of 16 bits, no finer. A unit
holds the codes of several numbers, its *parts*: two of 8 bits or four of 4 bits. Part s of unit i is number 2i + s of a
head of 8-bit codes, and number 2i + s // 2 + (s % 2) · D/2 of a head of 4-bit codes (`part_number`). So are the four of
12 bits, of which a unit is three *words*, a third of a head apart: the lower bytes of parts 0 and 2, those of 1 and 3,
and the upper nibbles of all, as codes of 4 bits lie.

Tensor cores take the parts as float16. An integer code is masked out and left as the low bits of a float16, which is
then subnormal: the code, counted from 0 on, in steps of 2^-24. Single codes are neither raised nor lowered: sums over
products are mended for the step, and for what signed codes count too much. Two units, a register, are turned at once.
Beside queries of bfloat16 codes of 12 bits become the lowest numbers of that type, the least of them subnormal.
"""

import triton
import triton.language as tl

# lop3 0x6a is (a & b) ^ c: signed bytes get their sign bit flipped, and count 128 more.
_INT8 = tl.constexpr("""{
        .reg .b32 flipped;
        xor.b32 flipped, $2, 0x80808080;
        and.b32 $0, flipped, 0x00ff00ff;
        prmt.b32 $1, flipped, 0, 0x4341;
    }""")
_UINT8 = tl.constexpr("""{
        and.b32 $0, $2, 0x00ff00ff;
        prmt.b32 $1, $2, 0, 0x4341;
    }""")
# The upper nibbles of bytes stay where they are, and count 16-fold.
_UINT4 = tl.constexpr("""{
        .reg .b32 upper;
        prmt.b32 upper, $4, 0, 0x4341;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, upper, 0x000f000f;
        sub.f16x2 $3, upper, $2;
    }""")
# As above, but the last part counts the whole byte.
_UINT4_BYTE = tl.constexpr("""{
        .reg .b32 upper;
        prmt.b32 $3, $4, 0, 0x4341;
        and.b32 $0, $4, 0x000f000f;
        and.b32 $1, $4, 0x00f000f0;
        and.b32 $2, $3, 0x000f000f;
    }""")
_E4M3 = tl.constexpr("""{
        .reg .b32 sorted;
        .reg .b16 low, high;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {low, high}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
    }""")
# The upper half of a float16 is a float8_e5m2.
_E5M2 = tl.constexpr("""{
        prmt.b32 $0, $2, 0, 0x2404;
        and.b32 $1, $2, 0xff00ff00;
    }""")


# The nibbles are bits 15 and 10..8 of bfloat16.
_FP12 = tl.constexpr("""{
        .reg .b32 lower, upper, signs;
        shl.b32 signs, $6, 4;
        and.b32 signs, signs, 0x80808080;
        and.b32 lower, $6, 0x07070707;
        or.b32 lower, lower, signs;
        shr.u32 upper, $6, 4;
        and.b32 upper, upper, 0x07070707;
        and.b32 signs, $6, 0x80808080;
        or.b32 upper, upper, signs;
        prmt.b32 $0, $4, lower, 0x6240;
        prmt.b32 $1, $5, upper, 0x6240;
        prmt.b32 $2, $4, lower, 0x7351;
        prmt.b32 $3, $5, upper, 0x7351;
    }""")
# The same numbers as float16, whose mantissa is three bits longer.
_BRAIN_TO_HALF = tl.constexpr("""{
        .reg .b32 sign;
        and.b32 sign, $1, 0x80008000;
        shl.b32 $0, $1, 3;
        and.b32 $0, $0, 0x3ff83ff8;
        or.b32 $0, $0, sign;
    }""")


@triton.jit  # type: ignore[untyped-decorator]
def part_number(unit: tl.tensor, PART: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Which number of the head part PART of a unit is."""
    number = PARTS * unit + PART
    if PARTS == 4:
        number = 2 * unit + PART // 2 + (PART % 2) * (HEAD_DIM // 2)
    return number


@triton.jit  # type: ignore[untyped-decorator]
def unit_numbers(
    words: tl.tuple, dtype: tl.constexpr, VALUE: tl.constexpr, FORMAT: tl.constexpr, PLAIN: tl.constexpr
) -> tl.tuple:
    """A tuple of the parts of units, each of their shape and of `dtype`. words: of the units, int16, or the numbers
    themselves.

    Integer codes are counted from 0 on (`DecodeShape.offset`) in steps of `DecodeShape.code_step`. Of four parts, those
    of upper nibbles count 16-fold, and the last one of values is the last two together: `separate_values`.
    PLAIN: by casts, where there are no CUDA instructions or `dtype` is float32.
    """
    units = words[0]
    if FORMAT == "no_quant":
        parts = (units,)
    elif FORMAT == "fp12_e4m7":
        parts = _plain_float12(words, dtype) if PLAIN else _float12(words, dtype)
    elif PLAIN:
        parts = _plain_numbers(units, dtype, VALUE, FORMAT)
    elif FORMAT == "int8":
        parts = _two(units, _INT8)
    elif FORMAT == "int8_affine":
        parts = _two(units, _UINT8)
    elif FORMAT == "int4" or FORMAT == "int4_affine":
        parts = _four(units, _UINT4_BYTE if VALUE else _UINT4)
    elif FORMAT == "fp8_e4m3":
        parts = _two(units, _E4M3)
    else:
        tl.static_assert(FORMAT == "fp8_e5m2")
        parts = _two(units, _E5M2)
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def separate_values(sums: tl.tuple, SHAPE: tl.constexpr) -> tl.tuple:
    """Sums over the parts of values as `unit_numbers` gives them -> sums over codes. SHAPE: a `DecodeShape`."""
    low, high = 1.0 / SHAPE.code_step, 0.0625 / SHAPE.code_step
    PARTS: tl.constexpr = SHAPE.parts
    separate: tl.tuple = ()
    if SHAPE.nibbles:
        separate = (sums[0] * low, sums[1] * high, sums[2] * low, (sums[3] - sums[2]) * high)
    else:
        for part in tl.static_range(PARTS):
            separate += (sums[part] * low,)
    return separate


@triton.jit  # type: ignore[untyped-decorator]
def _two(units: tl.tensor, ASM: tl.constexpr) -> tl.tuple:
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [units], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def _four(units: tl.tensor, ASM: tl.constexpr) -> tl.tuple:
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [units], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _float12(words: tl.tuple, dtype: tl.constexpr) -> tl.tuple:
    types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
    parts = tl.inline_asm_elementwise(
        _FP12, "=&r,=&r,=&r,=&r,r,r,r", [words[0], words[1], words[2]], types, is_pure=True, pack=2
    )
    if dtype == tl.float16:
        halves: tl.tuple = ()
        for part in tl.static_range(4):
            halves += (_brain_to_half(parts[part]),)
        parts = halves
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _brain_to_half(numbers: tl.tensor) -> tl.tensor:
    return tl.inline_asm_elementwise(_BRAIN_TO_HALF, "=&r,r", [numbers], tl.float16, is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def float12_number(code: tl.tensor) -> tl.tensor:
    """Codes of 12 bits, int32 -> float16."""
    return ((code & 0x7FF) << 3 | (code & 0x800) << 4).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _plain_float12(words: tl.tuple, dtype: tl.constexpr) -> tl.tuple:
    parts: tl.tuple = ()
    for part in tl.static_range(4):
        lower = words[part % 2].to(tl.int32) >> 8 * (part // 2) & 255
        parts += (float12_number(lower | (words[2].to(tl.int32) >> 4 * part & 15) << 8).to(dtype),)
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _plain_numbers(units: tl.tensor, dtype: tl.constexpr, VALUE: tl.constexpr, FORMAT: tl.constexpr) -> tl.tuple:
    bits = units.to(tl.int32)
    if FORMAT == "int4" or FORMAT == "int4_affine":
        LAST: tl.constexpr = 0xFF if VALUE else 0xF0
        parts: tl.tuple = (
            (bits & 0x0F).to(dtype),
            (bits & 0xF0).to(dtype),
            ((bits >> 8) & 0x0F).to(dtype),
            ((bits >> 8) & LAST).to(dtype),
        )
    else:
        parts = (_plain_number(bits & 255, dtype, FORMAT), _plain_number((bits >> 8) & 255, dtype, FORMAT))
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _plain_number(code: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    if FORMAT == "int8":
        number = (code ^ 128).to(dtype)
    elif FORMAT == "int8_affine":
        number = code.to(dtype)
    elif FORMAT == "fp8_e4m3":
        number = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        tl.static_assert(FORMAT == "fp8_e5m2")
        number = code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(dtype)
    return number
