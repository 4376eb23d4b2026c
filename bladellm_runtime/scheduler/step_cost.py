"""`StepCost`: how long a step with prompt tokens takes, as a line over what is in it, fitted to measured steps."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from typing import NamedTuple

SWEEPS = 2000
UNBOUNDED = 2**31
"""Tokens: more than any step has."""


class StepLoad(NamedTuple):
    """What the time of a step depends on.

    decode_rows, and decode_kv, the KV tokens they read. prefill_tokens, and prefill_pairs, the pairs of a query token
    and a KV token it attends to in prompts.
    """

    decode_rows: int
    decode_kv: int
    prefill_tokens: int
    prefill_pairs: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds of a step with prompt tokens: `step` alone; each `token` of it, decode rows among them, which go
    through the same matrices; and what the parts of a `StepLoad` add to that.

    sizes: token counts, ascending, that steps are padded to, at the cost of as many tokens; none above the largest is.
    """

    step: float
    token: float
    decode_row: float
    decode_kv: float
    prefill_pair: float
    sizes: tuple[int, ...] = ()

    def milliseconds(self, load: StepLoad) -> float:
        """How long a step takes."""
        costs = (self.step, self.token, self.decode_row, self.decode_kv, self.prefill_pair)
        return _dot(_features(load, self.sizes), costs)

    def decode_milliseconds(self, rows: int, kv_tokens: int) -> float:
        """What a step takes before the first prompt token is added."""
        return self.step + (self.token + self.decode_row) * rows + self.decode_kv * kv_tokens

    def prefill_milliseconds(self, tokens: int) -> float:
        """What prompt tokens add to steps, their attention left out."""
        return self.token * tokens

    def prefill_tokens(self, room: float, start: int) -> int:
        """How many tokens of a prompt, from position `start` on, a step does in `room` milliseconds more."""
        if room <= 0:
            return 0
        if room == inf:
            return UNBOUNDED
        # Its attention makes the time of a chunk of n tokens pair·n²/2 + (token + pair·start)·n.
        line = self.token + self.prefill_pair * start
        root = line + sqrt(line * line + 2 * self.prefill_pair * room)
        return int(min(2 * room / root, UNBOUNDED)) if root > 0 else UNBOUNDED


def padded(tokens: int, sizes: Sequence[int]) -> int:
    """The least of ascending sizes that holds as many tokens; the tokens themselves where none does."""
    index = bisect_left(sizes, tokens)
    return sizes[index] if index < len(sizes) else tokens


def chunk_pairs(start: int, tokens: int) -> int:
    """Pairs of query and KV token in the causal attention of a chunk of a prompt."""
    return tokens * start + tokens * (tokens + 1) // 2


def fit_step_cost(measured: Sequence[tuple[StepLoad, float]], sizes: Sequence[int] = ()) -> StepCost:
    """The line with the least squares of relative errors among those without negative costs; times in milliseconds, of
    steps padded to `sizes`.

    Coordinate descent for non-negative least squares: Franc, Hlaváč and Navara, "Sequential Coordinate-Wise Algorithm
    for the Non-negative Least Squares Problem" (2005). Raises `ValueError` without a positive time.
    """
    points = [[value / time for value in _features(load, sizes)] for load, time in measured if time > 0]
    if not points:
        raise ValueError("no step was measured")
    columns = range(len(points[0]))
    # Columns of unit length: a pair costs a millionth of what a step does.
    norms = [sqrt(sum(point[column] ** 2 for point in points)) or 1.0 for column in columns]
    scaled = [[value / norm for value, norm in zip(point, norms, strict=True)] for point in points]
    gram = [[sum(point[i] * point[j] for point in scaled) for j in columns] for i in columns]
    wanted = [sum(point[i] for point in scaled) for i in columns]
    costs = [0.0 for _ in columns]
    for _ in range(SWEEPS):
        for i in columns:
            if gram[i][i] > 0:
                costs[i] = max(0.0, costs[i] + (wanted[i] - _dot(gram[i], costs)) / gram[i][i])
    step, token, row, kv, pair = [cost / norm for cost, norm in zip(costs, norms, strict=True)]
    return StepCost(step, token, row, kv, pair, tuple(sizes))


def _features(load: StepLoad, sizes: Sequence[int]) -> tuple[float, ...]:
    tokens = padded(load.decode_rows + load.prefill_tokens, sizes)
    return (1.0, tokens, load.decode_rows, load.decode_kv, load.prefill_pairs)


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
