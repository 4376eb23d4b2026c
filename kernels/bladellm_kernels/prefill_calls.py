"""The calls of cuDNN's attention that have been planned for, and which ones are worth it at start."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

LENGTH_STEP = 128
# Pieces of a prefix are made of: two lengths an octave up to the longest.
SHORTEST_ROWS, LONGEST_PLANNED_PIECE, LONGEST_PLANNED_SQUARE = 1024, 65536, 8192


class CudnnCall(NamedTuple):
    """What cuDNN plans for, beside types and heads: its queries and keys, the mask, and the strides of the keys, which
    lie in the layer's memory or were copied out of it."""

    rows: int
    keys: int
    causal: bool
    copied: bool


class PlannedCalls:
    """The calls with a plan in this thread, on layers of one layout. Compared by identity.

    in_place: an operator may take rows of the layers as they are, if not beyond the end of a sequence's last granule of
    `granule_tokens`; otherwise keys are always copied.
    """

    def __init__(self, calls: Iterable[CudnnCall], in_place: bool, granule_tokens: int) -> None:
        self.calls = frozenset(calls)
        self.in_place = in_place
        self.granule_tokens = granule_tokens
        self._squares = sorted({call.rows for call in self.calls if call.causal})
        pieces: dict[int, list[int]] = {}
        for call in sorted(self.calls, reverse=True):
            if not call.causal:
                pieces.setdefault(call.rows, []).append(call.keys)
        self._pieces = dict(sorted(pieces.items()))

    def square(self, first: int, end: int) -> int | None:
        """The least square with a plan that holds positions [first, end) of a sequence."""
        for length in self._squares:
            if length >= end - first:
                copied = not (self.in_place and fits_granule(first + length, end, self.granule_tokens))
                if CudnnCall(length, length, True, copied) in self.calls:
                    return length
        return None

    def prefix(self, query_len: int, split: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """(rows, pieces) of the calls with plans that attend with at least `query_len` queries to keys [0, split)."""
        for rows, lengths in self._pieces.items():
            pieces = list(_fill(split, lengths)) if rows >= query_len else []
            if split and sum(pieces) == split:
                yield rows, tuple(pieces)


def fits_granule(last: int, end: int, granule_tokens: int) -> bool:
    """Whether positions up to `last` are within the last granule of a sequence of `end` tokens."""
    return last <= -(-end // granule_tokens) * granule_tokens


def _fill(length: int, lengths: Iterable[int]) -> Iterator[int]:
    """Longest first, as much of `length` as whole pieces of those lengths, given longest first, can cover."""
    for piece in lengths:
        while length >= piece:
            yield piece
            length -= piece


def calls_to_plan(
    max_tokens: int, max_length: int, longest_piece: int, in_place: bool, granule_tokens: int
) -> list[CudnnCall]:
    """What to plan for steps of up to `max_tokens` query tokens and sequences of up to `max_length`, the calls that
    gain most first, so that the rest may be left.

    Full chunks behind prefixes of any length; squares, the coarsest steps first; then shorter chunks behind prefixes.
    For 2048 and 32768 tokens 65 calls, 3 s at 45 ms each; for 8192 and 131072 191, 9 s.
    """
    widest = padded(min(max_tokens, max_length))
    pieces = [each for each in octave_halves(max_length) if each <= min(longest_piece, max_length)]
    rows = [widest, *(each for each in reversed(octave_halves(widest)) if SHORTEST_ROWS <= each < widest)]
    behind = [[CudnnCall(each, piece, False, not in_place) for piece in pieces] for each in rows]
    # A full chunk that begins less than a step behind a split takes a square of a step more.
    longest = min(widest, LONGEST_PLANNED_SQUARE) + LENGTH_STEP
    squares = [each for each in range(LENGTH_STEP, longest + 1, LENGTH_STEP) if each <= longest_piece]
    squares.sort(key=lambda length: (-(length & -length), -length))
    places = [False, *([True] if granule_tokens % LENGTH_STEP else [])] if in_place else [True]
    causal = [CudnnCall(length, length, True, copied) for length in squares for copied in places]
    return [*behind[0], *causal, *(call for line in behind[1:] for call in line)]


def octave_halves(longest: int) -> list[int]:
    """Multiples of LENGTH_STEP up to `longest` (and LONGEST_PLANNED_PIECE): powers of two, and halfway to the next."""
    powers = [LENGTH_STEP << shift for shift in range((LONGEST_PLANNED_PIECE // LENGTH_STEP).bit_length())]
    lengths = sorted({*powers, *(power * 3 // 2 for power in powers[1:-1])})
    return [length for length in lengths if length <= longest]


def padded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP
