"""Turn stored KV codes into numbers inside a kernel.

Kernels read quantized memory in *units* of two bytes: shared memory is transposed in steps of 16 bits, no finer. A unit
holds the codes of several numbers, its *parts*: two of 8 bits or four of 4 bits. Part s of unit i is number 2i + s of a
head of 8-bit codes, and number 2i + s // 2 + (s % 2) · D/2 of a head of 4-bit codes (`part_number`).

Every code, its offset taken off, is a float16 number. Two units, a register, are turned at once: where integers need
it, a byte or nibble becomes the low bits of a float16 from 1024 on, where neighbours lie 1 apart, and the excess is
taken away.
"""

import triton
import triton.language as tl


def _bytes(bias: int) -> tl.constexpr:
    """Both bytes of each unit: lop3 0x6a is (a & b) ^ c, which also flips the sign bit where the codes have one."""
    return tl.constexpr(f"""{{
        .reg .b32 low, high, bias;
        mov.b32 bias, {bias:#x};
        shr.u32 high, $2, 8;
        lop3.b32 low, $2, 0x00ff00ff, bias, 0x6a;
        lop3.b32 high, high, 0x00ff00ff, bias, 0x6a;
        sub.f16x2 $0, low, bias;
        sub.f16x2 $1, high, bias;
    }}""")


def _nibbles(low_bias: int, high_bias: int) -> tl.constexpr:
    """Four nibbles: those in bits 4 to 7 of a byte count 16-fold, which a fused multiply-add by 1/16 mends."""
    return tl.constexpr(f"""{{
        .reg .b32 shifted, n0, n1, n2, n3, magic, low, high, part;
        mov.b32 magic, 0x64006400;
        mov.b32 low, {low_bias:#x};
        mov.b32 high, {high_bias:#x};
        mov.b32 part, 0x2c002c00;
        shr.u32 shifted, $4, 8;
        lop3.b32 n0, $4, 0x000f000f, magic, 0x6a;
        lop3.b32 n1, $4, 0x00f000f0, magic, 0x6a;
        lop3.b32 n2, shifted, 0x000f000f, magic, 0x6a;
        lop3.b32 n3, shifted, 0x00f000f0, magic, 0x6a;
        sub.f16x2 $0, n0, low;
        fma.rn.f16x2 $1, n1, part, high;
        sub.f16x2 $2, n2, low;
        fma.rn.f16x2 $3, n3, part, high;
    }}""")


_INT8 = _bytes(0x64806480)  # 1024 + 128: the sign bit counts +128 after the flip
_UINT8 = _bytes(0x64006400)
_INT4 = _nibbles(0x64086408, 0xD480D480)  # 1024 + 8, -(64 + 8)
_UINT4 = _nibbles(0x64006400, 0xD400D400)
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


@triton.jit  # type: ignore[untyped-decorator]
def part_number(unit: tl.tensor, PART: tl.constexpr, PARTS: tl.constexpr, HEAD_DIM: tl.constexpr) -> tl.tensor:
    """Which number of the head part PART of a unit is."""
    number = PARTS * unit + PART
    if PARTS == 4:
        number = 2 * unit + PART // 2 + (PART % 2) * (HEAD_DIM // 2)
    return number


@triton.jit  # type: ignore[untyped-decorator]
def unit_numbers(units: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr, PLAIN: tl.constexpr) -> tl.tuple:
    """A tuple of the parts of `units` (int16, or the numbers themselves), each of their shape and of `dtype`.

    PLAIN: by casts, where there are no CUDA instructions or `dtype` is not float16.
    """
    if FORMAT == "no_quant":
        parts = (units,)
    elif PLAIN:
        parts = _plain_numbers(units, dtype, FORMAT)
    elif FORMAT == "int8":
        parts = _two(units, _INT8)
    elif FORMAT == "int8_affine":
        parts = _two(units, _UINT8)
    elif FORMAT == "int4":
        parts = _four(units, _INT4)
    elif FORMAT == "int4_affine":
        parts = _four(units, _UINT4)
    elif FORMAT == "fp8_e4m3":
        parts = _two(units, _E4M3)
    else:
        tl.static_assert(FORMAT == "fp8_e5m2")
        parts = _two(units, _E5M2)
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _two(units: tl.tensor, ASM: tl.constexpr) -> tl.tuple:
    return tl.inline_asm_elementwise(ASM, "=&r,=&r,r", [units], (tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit  # type: ignore[untyped-decorator]
def _four(units: tl.tensor, ASM: tl.constexpr) -> tl.tuple:
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&r,=&r,r", [units], (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
    )


@triton.jit  # type: ignore[untyped-decorator]
def _plain_numbers(units: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr) -> tl.tuple:
    bits = units.to(tl.int32)
    if FORMAT == "int4" or FORMAT == "int4_affine":
        OFFSET: tl.constexpr = 8 if FORMAT == "int4" else 0
        parts: tl.tuple = (
            ((bits & 15) - OFFSET).to(dtype),
            (((bits >> 4) & 15) - OFFSET).to(dtype),
            (((bits >> 8) & 15) - OFFSET).to(dtype),
            (((bits >> 12) & 15) - OFFSET).to(dtype),
        )
    else:
        parts = (_plain_number(bits & 255, dtype, FORMAT), _plain_number((bits >> 8) & 255, dtype, FORMAT))
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _plain_number(code: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    if FORMAT == "int8":
        number = ((code ^ 128) - 128).to(dtype)
    elif FORMAT == "int8_affine":
        number = code.to(dtype)
    elif FORMAT == "fp8_e4m3":
        number = code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        tl.static_assert(FORMAT == "fp8_e5m2")
        number = code.to(tl.uint8).to(tl.float8e5, bitcast=True).to(dtype)
    return number
