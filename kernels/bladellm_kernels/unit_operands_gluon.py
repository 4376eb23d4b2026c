"""Units as operands of a product of matrices: how threads hold them, and codes made into numbers in registers.

In Gluon, Triton's language with explicit layouts: a thread's 16 bytes of codes and the 16 bytes of x beside them hold
the same inputs, and a product of matrices does not mind in which order its inputs come, so both are operands as they
were loaded, without shared memory.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.weight_units_triton import BYTES_BF16, BYTES_FP16, NIBBLES_BF16, NIBBLES_FP16, RAW_NIBBLES_BF16

TILE_ROWS = gl.constexpr(64)
UNITS = gl.constexpr(32)
STEP_PAIRS = gl.constexpr(64 * 16)


class Inputs(NamedTuple):
    """x, [tokens, columns], as the functions of a kernel hand it on. stride: of a token; step: of a column."""

    x: gl.tensor
    stride: gl.tensor
    step: gl.tensor
    tokens: gl.tensor
    columns: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def sums_layout(warps: int, row_warps: int) -> gl.NVMMADistributedLayout:
    """Of sums [warps along K, rows, tokens]."""
    return gl.NVMMADistributedLayout([2, 0], [warps, row_warps, 1], [1, 16, 8])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def codes_layout(warps: int, row_warps: int, rows: int) -> gl.DistributedLinearLayout:
    """Of pairs of units [warps along K, rows, 16] on the way from memory: four of a row a thread, the rows of products
    beside each other one after another."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 8, 0], *_doublings(16 * row_warps, rows, 1)]
    lanes = [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    in_warps = _doublings(16, 16 * row_warps, 1) + _doublings(1, warps, 0)
    return gl.DistributedLinearLayout(registers, lanes, in_warps, [], [warps, rows, 16])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def inputs_layout(warps: int, row_warps: int, tokens: int) -> gl.DistributedLinearLayout:
    """Of a part of x, [warps along K, tokens, 32], likewise; row_warps load the same."""
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], *_doublings(8, tokens, 1)]
    lanes = [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    in_warps = [[0, 0, 0]] * (row_warps.bit_length() - 1) + _doublings(1, warps, 0)
    return gl.DistributedLinearLayout(registers, lanes, in_warps, [], [warps, tokens, 32])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _doublings(first: int, end: int, dimension: int) -> list[list[int]]:
    found = []
    while first < end:
        found.append([first if index == dimension else 0 for index in range(3)])
        first *= 2
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def first_row(weight: gl.tuple, first: gl.tensor) -> gl.tuple:
    """Pointer to the codes of row `first`, and where its scales and zero points begin."""
    tile = (first // TILE_ROWS).to(gl.int64)
    codes = weight.codes + tile * weight.steps * STEP_PAIRS + first % TILE_ROWS * (UNITS // 2)
    return codes, tile * weight.groups * TILE_ROWS + first % TILE_ROWS


@gluon.jit  # type: ignore[untyped-decorator]
def load_factors(
    factors: gl.tensor,
    steps: gl.tensor,
    groups: gl.tensor,
    start: gl.tensor,
    USED: gl.constexpr,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    OPERAND: gl.constexpr,
) -> gl.tuple:
    """Of each group of the warps' steps from `start` on, [warps, ROWS] beside the operand; USED: whether there are."""
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None]
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :]
    if ROWS > TILE_ROWS:
        row = row // TILE_ROWS * (groups * TILE_ROWS) + row % TILE_ROWS
    step = start + warp if SHAPE.even else gl.minimum(start + warp, steps - 1)
    found: gl.tuple = ()
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    for group in gl.static_range(GROUPS):
        if not USED:
            found += (0,)
        elif SHAPE.group_steps > 0:
            found += (gl.load(factors + (step // SHAPE.group_steps * TILE_ROWS + row)),)
        elif SHAPE.group_steps < 0:
            found += (gl.load(factors + ((step * GROUPS + group) * TILE_ROWS + row)),)
        else:
            found += (gl.load(factors + (step * 0 + row)),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def scales_at(
    weight: gl.tuple, output: gl.tensor, outputs: gl.tensor, SHAPE: gl.constexpr, PARTS: gl.constexpr
) -> gl.tuple:
    """Of a weight with one group the scales of numbered outputs, float32, of each part of so many; else nothing."""
    found: gl.tuple = ()
    if SHAPE.group_steps == 0:
        for part in gl.static_range(PARTS):
            place = weight.scales + part * outputs + output
            found += (gl.load(place, mask=output < outputs, other=0.0).to(gl.float32),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def interleaved(numbers: gl.tensor, ROWS: gl.constexpr, WARPS: gl.constexpr) -> gl.tensor:
    """[WARPS, ROWS, 32] with input 8 i + 2 j + k as number 8 j + 2 i + k: a thread's eight are where the operands of a
    product have them."""
    split = gl.permute(gl.reshape(numbers, [WARPS, ROWS, 4, 4, 2]), (0, 1, 3, 2, 4))
    return gl.reshape(split, [WARPS, ROWS, 32])


@gluon.jit  # type: ignore[untyped-decorator]
def unit_operands(
    pairs: gl.tensor,
    zeros: gl.tuple,
    dtype: gl.constexpr,
    SHAPE: gl.constexpr,
    ROWS: gl.constexpr,
    WARPS: gl.constexpr,
    ROW_WARPS: gl.constexpr,
) -> gl.tuple:
    """The parts of pairs of units, `code - zero` each, as left operands; see `weight_units_triton.unit_parts`."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(WARPS, ROW_WARPS), k_width=2)
    # Pairs stay whole until here: numbers of 16 bits that live through a loop are taken apart and put together.
    units = gl.reshape(gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)), [WARPS, ROWS, UNITS])
    units = gl.convert_layout(interleaved(units, ROWS, WARPS), LEFT)
    if SHAPE.plain:
        parts = _plain_parts(units, zeros, dtype, SHAPE)
    elif SHAPE.bits == 4 and dtype == gl.bfloat16:
        parts = gl.inline_asm_elementwise(
            NIBBLES_BF16, "=&r,=&r,=&r,=&r,r,r,r,r,r", _with_offsets(units, zeros, 0x4300, SHAPE),
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif SHAPE.bits == 4:
        parts = gl.inline_asm_elementwise(
            NIBBLES_FP16, "=&r,=&r,=&r,=&r,r,r,r,r,r", _with_offsets(units, zeros, 0x6400, SHAPE),
            (gl.float16, gl.float16, gl.float16, gl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif dtype == gl.bfloat16:
        parts = gl.inline_asm_elementwise(
            BYTES_BF16, "=&r,=&r,r", [units], (gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
        )
    else:
        parts = gl.inline_asm_elementwise(
            BYTES_FP16, "=&r,=&r,r", [units], (gl.float16, gl.float16), is_pure=True, pack=2
        )
    return parts


@gluon.jit  # type: ignore[untyped-decorator]
def _with_offsets(units: gl.tensor, zeros: gl.tuple, ONE: gl.constexpr, SHAPE: gl.constexpr) -> gl.tuple:
    """The units, and zero points in the low mantissa bits, like the codes."""
    found: gl.tuple = (units,)
    for part in gl.static_range(4):
        if SHAPE.has_zeros:
            zero = (zeros[part // SHAPE.group_parts].to(gl.int16) | ONE).to(gl.int16)
            found += (zero[:, :, None] + (units & 0),)
        else:
            found += (gl.full(units.shape, 8 | ONE, gl.int16, layout=units.type.layout),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def _plain_parts(units: gl.tensor, zeros: gl.tuple, dtype: gl.constexpr, SHAPE: gl.constexpr) -> gl.tuple:
    bits = units.to(gl.int32)
    found: gl.tuple = ()
    PARTS: gl.constexpr = SHAPE.parts
    for part in gl.static_range(PARTS):
        code = (bits >> SHAPE.bits * part) & (2**SHAPE.bits - 1)
        if SHAPE.has_zeros:
            found += ((code - zeros[part // SHAPE.group_parts].to(gl.int32)[:, :, None]).to(dtype),)
        else:
            found += ((code - 2 ** (SHAPE.bits - 1)).to(dtype),)
    return found


@gluon.jit  # type: ignore[untyped-decorator]
def raw_operands(
    pairs: gl.tensor, dtype: gl.constexpr, SHAPE: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr
) -> gl.tuple:
    """The parts of pairs of units, `128 + code` each, as left operands."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(WARPS, 1), k_width=2)
    units = gl.reshape(gl.join(pairs.to(gl.int16), (pairs >> 16).to(gl.int16)), [WARPS, ROWS, UNITS])
    units = gl.convert_layout(interleaved(units, ROWS, WARPS), LEFT)
    if SHAPE.plain:
        parts: gl.tuple = ()
        for part in gl.static_range(4):
            parts += (((units.to(gl.int32) >> 4 * part & 15) + 128).to(dtype),)
    else:
        parts = gl.inline_asm_elementwise(
            RAW_NIBBLES_BF16, "=&r,=&r,=&r,=&r,r", [units],
            (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    return parts
