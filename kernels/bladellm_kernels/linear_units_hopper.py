"""How the tiles of a weight are divided into units of `linear_hopper`, and how its programs take them.

Where programs start as room for them appears, one multiprocessor may get two of them and another one none. With more
units than programs, those that are alone take more. What a unit adds up does not depend on who takes it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Units(NamedTuple):
    """count: of the units; tiles: of all; length: tiles along K; taken: counter of the units behind the programs'
    first ones, 0 between calls."""

    count: gl.tensor
    tiles: gl.tensor
    length: gl.tensor
    taken: gl.tensor


@gluon.jit  # type: ignore[untyped-decorator]
def tiles_of(unit: gl.tensor, work: gl.tuple) -> gl.tuple:
    """A unit's first tile, and the one behind its last; none where there is no such unit."""
    begin = gl.minimum(unit, work.count) * work.tiles // work.count
    return begin, gl.minimum(unit + 1, work.count) * work.tiles // work.count


@gluon.jit  # type: ignore[untyped-decorator]
def next_unit(work: gl.tuple, QUEUE: gl.constexpr) -> gl.tensor:
    """The unit that a program takes after its present one; one that is not where there are no more.

    Each unit is followed by one addition to the counter: who makes the last one takes it back.
    """
    unit = work.count
    if QUEUE:
        taken = gl.atomic_add(work.taken, 1, sem="relaxed")
        if taken == work.count - 1:
            gl.store(work.taken, 0)
        unit = gl.num_programs(0) + taken
    return unit


@gluon.jit  # type: ignore[untyped-decorator]
def tile_ahead(tile: gl.tensor, end: gl.tensor, next_begin: gl.tensor, next_end: gl.tensor) -> gl.tuple:
    """A tile counted on from a unit that ends at `end`, and the end of the unit which it is in, this or the next."""
    limit = end
    if tile >= end:
        tile = next_begin + tile - end
        limit = next_end
    return tile, limit


@gluon.jit  # type: ignore[untyped-decorator]
def _owner(tile: gl.tensor, work: gl.tuple) -> gl.tensor:
    """The unit that has a tile."""
    return ((tile + 1) * work.count - 1) // work.tiles


@gluon.jit  # type: ignore[untyped-decorator]
def block_segments(block: gl.tensor, work: gl.tuple) -> gl.tuple:
    """The lowest unit that has tiles of a block, and how many have."""
    lowest = _owner(block * work.length, work)
    return lowest, _owner(block * work.length + work.length - 1, work) - lowest + 1
