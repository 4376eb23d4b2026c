"""Scales and zero points for `ring_units_hopper`: asked into the L2 cache at first, into registers one step ahead."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from bladellm_kernels.linear_sums_hopper import sums_layout
from bladellm_kernels.weight_units_triton import prefetch_lines

TILE_ROWS = gl.constexpr(64)


class UnitTile(NamedTuple):
    """`linear_sums_hopper.Tile` of a group of four warps, of some steps along K. rows: tokens; outputs: of each part.

    A program has wide · deep groups: `wide` of them beside each other along the outputs, which share the inputs of a
    tile, and `deep` that take the tiles of the same outputs by turns. ahead: stages that are filled before the inputs
    are ready. unrolled: as there, of groups that share the registers.
    """

    rows: int
    outputs: int
    inputs: int
    stages: int
    wide: int
    deep: int
    parts: int
    steps: int
    squares: int
    ahead: int
    unrolled: int = 4096
    warps: int = 4


class Factors(NamedTuple):
    """Pointers to the scales and zero points of a block of outputs in the first group."""

    scales: gl.tensor
    zeros: gl.tensor


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def row_layout(sums: gl.NVMMADistributedLayout, operand: bool) -> gl.SliceLayout:
    """Of a number of every output, beside the sums of a product or its left operand."""
    return gl.SliceLayout(1, gl.DotOperandLayout(operand_index=0, parent=sums, k_width=2) if operand else sums)


@gluon.jit  # type: ignore[untyped-decorator]
def block_factors(
    weight: gl.tuple, block: gl.tensor, SHAPE: gl.constexpr, FOLD: gl.constexpr, TILE: gl.constexpr
) -> Factors:
    """Of the outputs of all parts. FOLD: scales lie beside the operand, where the weight has more than one group."""
    SCALES: gl.constexpr = row_layout(sums_layout(TILE), FOLD and SHAPE.group_steps != 0)
    ZEROS: gl.constexpr = row_layout(sums_layout(TILE), True)
    row = gl.arange(0, TILE.parts * TILE.outputs, layout=SCALES)
    operand = gl.arange(0, TILE.parts * TILE.outputs, layout=ZEROS)
    return Factors(
        weight.scales + _places(weight, block, row, TILE), weight.zeros + _places(weight, block, operand, TILE)
    )


@gluon.jit  # type: ignore[untyped-decorator]
def _places(weight: gl.tuple, block: gl.tensor, row: gl.tensor, TILE: gl.constexpr) -> gl.tensor:
    """Of rows of all parts of a block, in the first group; those beyond a part's last tile are of it, and their outputs
    are not stored."""
    tiles = weight.tiles // TILE.parts
    in_part = block * TILE.outputs + row % TILE.outputs
    tile = row // TILE.outputs * tiles + gl.minimum(in_part // TILE_ROWS, tiles - 1)
    return tile * (weight.groups * TILE_ROWS) + in_part % TILE_ROWS


@gluon.jit  # type: ignore[untyped-decorator]
def load_factors(
    factors: gl.tuple, steps: gl.tensor, place: gl.tensor, SHAPE: gl.constexpr, TILE: gl.constexpr
) -> gl.tuple:
    """Tuples of the scales and zero points of each group of each step of a tile at `place` along K; steps: of the
    weight, which the last tile may go beyond."""
    scales: gl.tuple = ()
    zeros: gl.tuple = ()
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    STEPS: gl.constexpr = TILE.steps
    for index in gl.static_range(STEPS):
        step = place * STEPS + index
        if STEPS > 1:
            step = gl.minimum(step, steps - 1)
        for group in gl.static_range(GROUPS):
            offset = _group(step, group, SHAPE) * TILE_ROWS
            scales += (gl.load(factors.scales + offset),)
            if SHAPE.has_zeros:
                zeros += (gl.load(factors.zeros + offset),)
    return scales, zeros


@gluon.jit  # type: ignore[untyped-decorator]
def _group(step: gl.tensor, index: gl.tensor, SHAPE: gl.constexpr) -> gl.tensor:
    """The number of a step's group."""
    if SHAPE.group_steps > 0:
        group = step // SHAPE.group_steps
    elif SHAPE.group_steps < 0:
        group = step * SHAPE.groups_per_step + index
    else:
        group = step * 0
    return group


@gluon.jit  # type: ignore[untyped-decorator]
def prefetch_factors(
    weight: gl.tuple, begin: gl.tensor, end: gl.tensor, length: gl.tensor, SHAPE: gl.constexpr, TILE: gl.constexpr
) -> None:
    """Ask for those of the first tiles from `begin` on, as many as the first group of warps has threads for."""
    TILES: gl.constexpr = TILE.wide * TILE.parts * TILE.outputs // TILE_ROWS
    STEPS: gl.constexpr = TILE.steps
    GROUPS: gl.constexpr = SHAPE.groups_per_step
    thread = gl.arange(0, 32 * TILE.warps, layout=gl.BlockedLayout([1], [32], [TILE.warps], [0]))
    each = gl.minimum(begin + thread // (TILES * STEPS * GROUPS), end - 1)
    step = gl.minimum(each % length * STEPS + thread // TILES % STEPS, weight.steps - 1)
    tile = thread % TILES
    block = each // length * TILE.wide + tile // (TILE.parts * TILE.outputs // TILE_ROWS)
    row = tile % (TILE.parts * TILE.outputs // TILE_ROWS) * TILE_ROWS
    place = _places(weight, block, row, TILE) + _group(step, thread // (TILES * STEPS) % GROUPS, SHAPE) * TILE_ROWS
    prefetch_lines(weight.scales + place)
    if SHAPE.has_zeros:
        prefetch_lines(weight.zeros + place)
