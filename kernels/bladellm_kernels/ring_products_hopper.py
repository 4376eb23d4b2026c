"""Products of `ring_units_hopper`: a stage's units become left operands in registers, times the inputs of a tile."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from bladellm_kernels.linear_sums_hopper import sums_layout
from bladellm_kernels.ring_factors_hopper import UnitTile
from bladellm_kernels.ring_tiles_hopper import TILE_ROWS, UNITS
from bladellm_kernels.weight_units_triton import unit_parts


class Staged(NamedTuple):
    """What a group of warps multiplies of a stage: its units, [parts, tiles, steps · 64, 32], the inputs, [tokens,
    inputs], and a tuple of scales and one of zero points of each group of each step."""

    units: gl.shared_memory_descriptor
    numbers: gl.shared_memory_descriptor
    factors: gl.tuple


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def most_registers(groups: int) -> int:
    """Of a thread by the groups of a program, beside 24 of the producer warp."""
    return {2: 240, 3: 160, 4: 112}[groups]


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def units_layout(tile: UnitTile) -> gl.DistributedLinearLayout:
    """Of the units of a step, [parts, tiles, 64, 32], in registers: as a product's left operand [outputs of all parts,
    32] lies."""
    outputs = tile.outputs
    rows = [[bit // outputs, bit % outputs // 64, bit % 64, 0] for bit in _doublings(16, tile.parts * outputs)]
    in_warps = tile.warps.bit_length() - 1
    registers = [[0, 0, 0, 1], [0, 0, 8, 0], [0, 0, 0, 8], [0, 0, 0, 16], *rows[in_warps:]]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 0, 4, 0]]
    shape = [tile.parts, outputs // 64, 64, 32]
    return gl.DistributedLinearLayout(registers, lanes, rows[:in_warps], [], shape)


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def _doublings(first: int, end: int) -> list[int]:
    return [1 << bit for bit in range(first.bit_length() - 1, end.bit_length() - 1)]


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def holds_two_operands(outputs: int, rows: int, groups: int) -> bool:
    """Whether registers hold the operands of two steps beside sums and a product of [outputs, rows]."""
    most: int = most_registers(groups)
    return outputs + outputs * rows // 64 + 16 <= most


@gluon.jit  # type: ignore[untyped-decorator]
def no_sums(TILE: gl.constexpr) -> gl.tensor:
    """The sums of nothing, float32 [outputs of all parts, tokens]."""
    OUTPUTS: gl.constexpr = TILE.parts * TILE.outputs
    ROWS: gl.constexpr = TILE.rows
    return gl.zeros((OUTPUTS, ROWS), gl.float32, sums_layout(TILE))


@gluon.jit  # type: ignore[untyped-decorator]
def add_products(
    sums: gl.tensor, staged: gl.tuple, SHAPE: gl.constexpr, FOLD: gl.constexpr, TILE: gl.constexpr
) -> gl.tensor:
    """Sums plus the product of a stage, scaled unless the weight has one group. staged: `Staged`."""
    if FOLD or SHAPE.group_steps == 0:
        STEPS: gl.constexpr = TILE.steps
        for step in gl.static_range(STEPS):
            parts = _operands(staged, step, SHAPE, FOLD, TILE)
            columns = staged.numbers.slice(step * SHAPE.step, SHAPE.step, 1)
            sums = _add_parts(sums, parts, columns, True, TILE)
        sums = warpgroup_mma_wait(num_outstanding=0, deps=(sums,))
    else:
        sums = _add_groups(sums, staged, SHAPE, TILE)
    return sums


@gluon.jit  # type: ignore[untyped-decorator]
def _add_groups(sums: gl.tensor, staged: gl.tuple, SHAPE: gl.constexpr, TILE: gl.constexpr) -> gl.tensor:
    """Sums plus the products of each group of a stage times its scale, each waited for behind the next operands, unless
    registers do not hold them."""
    STEPS: gl.constexpr = TILE.steps
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    SIZE: gl.constexpr = SHAPE.group_parts
    AHEAD: gl.constexpr = holds_two_operands(TILE.parts * TILE.outputs, TILE.rows, TILE.wide * TILE.deep)
    scales = staged.factors[0]
    product = no_sums(TILE)
    for step in gl.static_range(STEPS):
        parts = _operands(staged, step, SHAPE, False, TILE)
        for group in gl.static_range(GROUPS):
            if step * GROUPS + group > 0 and AHEAD:
                sums = _add_scaled(sums, product, scales[step * GROUPS + group - 1])
            columns = staged.numbers.slice(step * SHAPE.step + group * SIZE * UNITS, SIZE * UNITS, 1)
            product = _add_parts(no_sums(TILE), parts[group * SIZE : (group + 1) * SIZE], columns, False, TILE)
            if not AHEAD:
                sums = _add_scaled(sums, product, scales[step * GROUPS + group])
    if AHEAD:
        sums = _add_scaled(sums, product, scales[STEPS * GROUPS - 1])
    return sums


@gluon.jit  # type: ignore[untyped-decorator]
def _add_scaled(sums: gl.tensor, product: gl.tensor, scale: gl.tensor) -> gl.tensor:
    """Sums plus a product that may still be on its way, times the scale of each output."""
    return sums + warpgroup_mma_wait(num_outstanding=0, deps=(product,)) * scale.to(gl.float32)[:, None]


@gluon.jit  # type: ignore[untyped-decorator]
def _add_parts(
    sums: gl.tensor, parts: gl.tuple, columns: gl.shared_memory_descriptor, ADD: gl.constexpr, TILE: gl.constexpr
) -> gl.tensor:
    """Sums, where ADD, plus the products of parts and their inputs, on their way."""
    OUTPUTS: gl.constexpr = TILE.parts * TILE.outputs
    left = parts[0]
    if len(parts) == 2:
        left = _behind_each_other(parts[0], parts[1], OUTPUTS, 2 * UNITS, TILE)
    elif len(parts) == 4:
        first = _behind_each_other(parts[0], parts[1], OUTPUTS, 2 * UNITS, TILE)
        second = _behind_each_other(parts[2], parts[3], OUTPUTS, 2 * UNITS, TILE)
        left = _behind_each_other(first, second, OUTPUTS, 4 * UNITS, TILE)
    return warpgroup_mma(left, columns.permute((1, 0)), sums, use_acc=ADD, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _behind_each_other(
    first: gl.tensor, second: gl.tensor, OUTPUTS: gl.constexpr, INPUTS: gl.constexpr, TILE: gl.constexpr
) -> gl.tensor:
    """The inputs of two left operands as those of one, [OUTPUTS, INPUTS]."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(TILE), k_width=2)
    both = gl.reshape(gl.permute(gl.join(first, second), (0, 2, 1)), [OUTPUTS, INPUTS])
    return gl.convert_layout(both, LEFT, assert_trivial=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _operands(
    staged: gl.tuple, step: gl.constexpr, SHAPE: gl.constexpr, FOLD: gl.constexpr, TILE: gl.constexpr
) -> gl.tuple:
    """The parts of the units of a step of a stage as left operands: `code - zero` each, where FOLD times its scale."""
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=sums_layout(TILE), k_width=2)
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    PARTS: gl.constexpr = SHAPE.parts
    OUTPUTS: gl.constexpr = TILE.parts * TILE.outputs
    matrices = staged.units.slice(step * TILE_ROWS, TILE_ROWS, 2)
    units = gl.reshape(matrices.load(units_layout(TILE)), [OUTPUTS, UNITS])
    units = gl.convert_layout(units, LEFT, assert_trivial=True)
    points: gl.tuple = ()
    for part in gl.static_range(4):
        if SHAPE.has_zeros:
            zero = staged.factors[1][step * GROUPS + part // SHAPE.group_parts].to(gl.int32)
            points += (zero[:, None] + (units & 0).to(gl.int32),)
        else:
            points += (gl.full([OUTPUTS, UNITS], 8, gl.int32, LEFT),)
    parts = unit_parts(units, points, staged.numbers.dtype, SHAPE)
    if FOLD and SHAPE.group_steps != 0:
        folded: gl.tuple = ()
        for part in gl.static_range(PARTS):
            scale = staged.factors[0][step * GROUPS + part // SHAPE.group_parts]
            folded += (parts[part] * scale.to(staged.numbers.dtype)[:, None],)
        parts = folded
    return parts
