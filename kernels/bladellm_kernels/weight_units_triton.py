"""Turn packed weights into numbers inside a kernel, and apply their scales; see `weight_units.py` for the layout.

Two units, one register, are turned at once. A 4-bit code becomes the low mantissa bits of 128 (bfloat16) or 1024
(float16), where neighbours lie 1 apart; `128 + zero` is then taken away, which is exact. An 8-bit code has one bit more
than the mantissa of a bfloat16: its high bit goes into the number taken away instead.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

UNITS = tl.constexpr(32)
"""Of a row in a step."""
TILE_ROWS = tl.constexpr(64)
STEP_BLOCK = tl.constexpr(32 * 64)
"""Units of one step of one tile."""


class WeightArguments(NamedTuple):
    """A `UnitWeight`: pointers, tiles of rows, steps of a row, groups of a row."""

    codes: Any
    scales: Any
    zeros: Any
    tiles: Any
    steps: Any
    groups: Any


@dataclass(frozen=True, slots=True)
class UnitShape:
    """What is fixed when a kernel over a `UnitWeight` is compiled.

    group_steps: as there. has_zeros: whether the weight has zero points of its own. even: whether the columns are whole
    steps, and the steps whole rounds of a program's warps. plain: without CUDA instructions.
    """

    bits: int
    group_steps: int
    has_zeros: bool
    even: bool
    plain: bool

    @property
    def parts(self) -> int:
        return 16 // self.bits

    @property
    def step(self) -> int:
        """Inputs of a step."""
        return 32 * self.parts

    @property
    def groups_per_step(self) -> int:
        return max(1, -self.group_steps)

    @property
    def group_parts(self) -> int:
        """Parts of a step that share a scale."""
        return self.parts // self.groups_per_step


def _nibbles(kind: str, one: int) -> tl.constexpr:
    """Four nibbles of two units each, less the numbers of $5 to $8. lop3 0xea is (a & b) | c."""
    return tl.constexpr(f"""{{
        .reg .b32 s1, s2, s3, n0, n1, n2, n3, one;
        mov.b32 one, {one:#x};
        shr.u32 s1, $4, 4;
        shr.u32 s2, $4, 8;
        shr.u32 s3, $4, 12;
        lop3.b32 n0, $4, 0x000f000f, one, 0xea;
        lop3.b32 n1, s1, 0x000f000f, one, 0xea;
        lop3.b32 n2, s2, 0x000f000f, one, 0xea;
        lop3.b32 n3, s3, 0x000f000f, one, 0xea;
        sub.{kind} $0, n0, $5;
        sub.{kind} $1, n1, $6;
        sub.{kind} $2, n2, $7;
        sub.{kind} $3, n3, $8;
    }}""")


RAW_NIBBLES_BF16 = tl.constexpr("""{
        .reg .b32 s1, s2, s3, one;
        mov.b32 one, 0x43004300;
        shr.u32 s1, $4, 4;
        shr.u32 s2, $4, 8;
        shr.u32 s3, $4, 12;
        lop3.b32 $0, $4, 0x000f000f, one, 0xea;
        lop3.b32 $1, s1, 0x000f000f, one, 0xea;
        lop3.b32 $2, s2, 0x000f000f, one, 0xea;
        lop3.b32 $3, s3, 0x000f000f, one, 0xea;
    }""")
"""Four nibbles of two units each, plus 128."""
NIBBLES_BF16 = _nibbles("bf16x2", 0x43004300)
NIBBLES_FP16 = _nibbles("f16x2", 0x64006400)
# 128 + (c & 127), less 128 where the high bit is set and 256 where it is not. lop3 0xae is (~a & b) | c.
BYTES_BF16 = tl.constexpr("""{
        .reg .b32 high, low0, low1, off0, off1, one;
        mov.b32 one, 0x43004300;
        shr.u32 high, $2, 8;
        lop3.b32 low0, $2, 0x007f007f, one, 0xea;
        lop3.b32 low1, high, 0x007f007f, one, 0xea;
        lop3.b32 off0, $2, 0x00800080, one, 0xae;
        lop3.b32 off1, high, 0x00800080, one, 0xae;
        sub.bf16x2 $0, low0, off0;
        sub.bf16x2 $1, low1, off1;
    }""")
BYTES_FP16 = tl.constexpr("""{
        .reg .b32 high, n0, n1, one, middle;
        mov.b32 one, 0x64006400;
        mov.b32 middle, 0x64806480;
        shr.u32 high, $2, 8;
        lop3.b32 n0, $2, 0x00ff00ff, one, 0xea;
        lop3.b32 n1, high, 0x00ff00ff, one, 0xea;
        sub.f16x2 $0, n0, middle;
        sub.f16x2 $1, n1, middle;
    }""")


@triton.jit  # type: ignore[untyped-decorator]
def unit_parts(units: tl.tensor, zeros: tl.tuple, dtype: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """A tuple of the parts of `units` (int16), `code - zero` each, of their shape and of `dtype`.

    zeros: of each part, int32 of the shape of units; not looked at for 8 bits, where it is 128.
    """
    if SHAPE.plain:
        parts = _plain_parts(units, zeros, dtype, SHAPE.bits)
    elif SHAPE.bits == 4 and dtype == tl.bfloat16:
        parts = tl.inline_asm_elementwise(
            NIBBLES_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r", _with_offsets(units, zeros, 0x4300),
            (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif SHAPE.bits == 4:
        parts = tl.inline_asm_elementwise(
            NIBBLES_FP16, "=&r,=&r,=&r,=&r,r,r,r,r,r", _with_offsets(units, zeros, 0x6400),
            (tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif dtype == tl.bfloat16:
        parts = tl.inline_asm_elementwise(
            BYTES_BF16, "=&r,=&r,r", [units], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        parts = tl.inline_asm_elementwise(
            BYTES_FP16, "=&r,=&r,r", [units], (tl.float16, tl.float16), is_pure=True, pack=2
        )
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def _with_offsets(units: tl.tensor, zeros: tl.tuple, ONE: tl.constexpr) -> tl.tuple:
    """The units, and zero points in the low mantissa bits, like the codes."""
    return (
        units,
        (zeros[0] | ONE).to(tl.int16),
        (zeros[1] | ONE).to(tl.int16),
        (zeros[2] | ONE).to(tl.int16),
        (zeros[3] | ONE).to(tl.int16),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _plain_parts(units: tl.tensor, zeros: tl.tuple, dtype: tl.constexpr, BITS: tl.constexpr) -> tl.tuple:
    bits = units.to(tl.int32)
    if BITS == 4:
        parts: tl.tuple = (
            ((bits & 15) - zeros[0]).to(dtype),
            (((bits >> 4) & 15) - zeros[1]).to(dtype),
            (((bits >> 8) & 15) - zeros[2]).to(dtype),
            (((bits >> 12) & 15) - zeros[3]).to(dtype),
        )
    else:
        parts = (((bits & 255) - 128).to(dtype), (((bits >> 8) & 255) - 128).to(dtype))
    return parts


@triton.jit  # type: ignore[untyped-decorator]
def step_factors(factors: tl.tensor, step: tl.tensor, USED: tl.constexpr, SHAPE: tl.constexpr) -> tl.tuple:
    """Scales or zero points of each group of a step; USED: whether there are any.

    factors: pointers to those of group 0, one a row. step: of the shape of factors, or one for all.
    """
    found: tl.tuple = ()
    GROUPS: tl.constexpr = SHAPE.groups_per_step
    for group in tl.static_range(GROUPS):
        if not USED:
            found += (0,)
        elif SHAPE.group_steps == 0:
            found += (tl.load(factors),)
        elif SHAPE.group_steps > 0:
            found += (tl.load(factors + step // SHAPE.group_steps * TILE_ROWS),)
        else:
            found += (tl.load(factors + (step * GROUPS + group) * TILE_ROWS),)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def part_zeros(zeros: tl.tuple, units: tl.tensor, SHAPE: tl.constexpr) -> tl.tuple:
    """The zero point of each part, int32 of the shape of units; zeros: of each group, of all its dimensions but one."""
    found: tl.tuple = ()
    for part in tl.static_range(4):
        if SHAPE.has_zeros:
            zero = tl.expand_dims(zeros[part // SHAPE.group_parts].to(tl.int32), -1)
            found += (tl.broadcast_to(zero, units.shape),)
        else:
            found += (tl.full(units.shape, 8, tl.int32),)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def prefetch_lines(pointers: tl.tensor) -> None:
    """Ask for the 128-byte lines of `pointers` to be brought to the L2 cache."""
    tl.inline_asm_elementwise(
        "{ prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l", [pointers], tl.int32, is_pure=False, pack=1
    )
