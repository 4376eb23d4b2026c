"""How a large prefill chunk is cut into calls of cuDNN, which plans for every shape once, some 45 ms each.

cuDNN's causal operator masks from the top left. So with `split` a multiple of LENGTH_STEP at or before a chunk's
start, the chunk is

  - the square: queries and keys from `split` on, causal, to a padded end;
  - the prefix: the chunk's queries against [0, split) in pieces, without mask, to a padded end of the queries.

Padding costs time on every layer of every step, planning once in the life of the process: 45 ms are some 30 steps'
gain of 5 % of a chunk of 2048 tokens in 32 layers. Without `PlannedCalls`, squares have every multiple of 128 up to
8192 (64 plans, 2.9 s; at most 1/64 is padding from 4096 on), the queries of a prefix 8 lengths an octave, and pieces of
a prefix 4 lengths an octave: what remains behind one piece is another one, of a quarter of its length at most. With
them, a chunk takes only calls that have been planned at start, or none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from bladellm_kernels.prefill_calls import LENGTH_STEP, PlannedCalls
from bladellm_kernels.prefill_costs import Heads, merge_cost, rectangle_cost, square_cost

LONGEST_PIECE = 65536
SQUARE_STEPS, ROW_STEPS, PIECE_STEPS = 64, 8, 4
# Most positions before a chunk that its square takes in, in place of a small piece.
LONGEST_LEAD = 512


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """split: where prefix and square meet; square: rows of the square; rows: queries of the prefix's calls."""

    split: int
    square: int
    rows: int
    pieces: tuple[int, ...]


@lru_cache(maxsize=256)
def plan_chunk(
    heads: Heads,
    query_len: int,
    start: int,
    longest_piece: int = LONGEST_PIECE,
    planned: PlannedCalls | None = None,
) -> ChunkPlan | None:
    """How a chunk is computed at least cost; longest_piece: a power of two, at least LENGTH_STEP.

    With `planned`, of those calls only: None where they do not do. Kept, since all layers of a step ask for the same.
    """
    if planned is None:
        plans = list(_plans(query_len, start, longest_piece))
    else:
        plans = list(_planned_plans(query_len, start, planned))
    return min(plans, key=lambda plan: plan_cost(heads, plan), default=None)


def plan_cost(heads: Heads, plan: ChunkPlan) -> float:
    """µs of cuDNN's calls and of their merging."""
    pieces = sum(rectangle_cost(heads, plan.rows, piece) for piece in plan.pieces)
    return square_cost(heads, plan.square) + pieces + merge_cost(heads, plan.rows, len(plan.pieces) + 1)


def _plans(query_len: int, start: int, longest_piece: int) -> Iterator[ChunkPlan]:
    """Those with a lead of less than LONGEST_LEAD."""
    for split in _splits(start):
        square = padded_length(start + query_len - split, SQUARE_STEPS)
        rows = padded_length(query_len, ROW_STEPS) if split else 0
        yield ChunkPlan(split, square, rows, tuple(_pieces(split, longest_piece)))


def _planned_plans(query_len: int, start: int, planned: PlannedCalls) -> Iterator[ChunkPlan]:
    """The same, of planned calls; none is longer than `longest_piece`, or it would not have been planned."""
    for split in _splits(start):
        square = planned.square(split, start + query_len)
        if square is None:
            continue
        if not split:
            yield ChunkPlan(0, square, 0, ())
        for rows, pieces in planned.prefix(query_len, split):
            yield ChunkPlan(split, square, rows, pieces)


def _splits(start: int) -> Iterator[int]:
    first = start // LENGTH_STEP * LENGTH_STEP
    yield from range(first, max(-1, start - LONGEST_LEAD), -LENGTH_STEP)


def _pieces(length: int, longest: int) -> Iterator[int]:
    """Longest first."""
    while length > 0:
        step = length_step(length, PIECE_STEPS)
        piece = min(longest, length // step * step)
        yield piece
        length -= piece


def padded_length(length: int, steps: int) -> int:
    """`length` rounded up: to multiples of LENGTH_STEP, and of 1/steps of the power of two below it."""
    step = length_step(length, steps)
    return -(-length // step) * step


def length_step(length: int, steps: int) -> int:
    """Between the lengths of as many steps an octave, above the power of two below `length`."""
    return max(LENGTH_STEP, (1 << (length - 1).bit_length()) // (2 * steps))
