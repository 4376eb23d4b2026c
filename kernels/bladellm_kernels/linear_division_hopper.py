"""How the tiles of a weight are divided among the programs of `linear_hopper` and `ring_units_hopper`."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Division(NamedTuple):
    """programs: among which all `tiles` are divided; length: tiles along K."""

    programs: gl.tensor
    tiles: gl.tensor
    length: gl.tensor


@gluon.jit  # type: ignore[untyped-decorator]
def tiles_of(program: gl.tensor, work: gl.tuple) -> gl.tuple:
    """A program's first tile, and the one behind its last."""
    return program * work.tiles // work.programs, (program + 1) * work.tiles // work.programs


@gluon.jit  # type: ignore[untyped-decorator]
def _owner(tile: gl.tensor, work: gl.tuple) -> gl.tensor:
    """The program that takes a tile."""
    return ((tile + 1) * work.programs - 1) // work.tiles


@gluon.jit  # type: ignore[untyped-decorator]
def block_segments(block: gl.tensor, work: gl.tuple) -> gl.tuple:
    """The lowest program that has tiles of a block, and how many have."""
    lowest = _owner(block * work.length, work)
    return lowest, _owner(block * work.length + work.length - 1, work) - lowest + 1
