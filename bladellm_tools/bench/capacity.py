"""The highest load an endpoint carries within a limit: where its curve crosses the line."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from bladellm_tools.bench.figures import LevelFigures
from bladellm_tools.bench.slo import SloLimit
from bladellm_tools.bench.stats import Floats, Interval, t_interval

FLAT = 1e-12
Kind: TypeAlias = Literal["at", "above", "below", "unknown"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """The QPS up to which an endpoint keeps a limit.

    `kind` "at": it crosses at `qps`; "above": it was never seen to cross and `qps` is the highest steady level, so
    that the truth is above; "below": already the lowest level, `qps`, is past it; "unknown": no level can tell.
    """

    endpoint: str
    limit: SloLimit
    kind: Kind
    qps: float | None = None
    interval: Interval | None = None
    note: str = ""

    @property
    def text(self) -> str:
        """As people write it: `8.1 QPS`, `above 10 QPS`, `below 1 QPS` or `unknown`."""
        if self.qps is None:
            return "unknown"
        return f"{self.qps:.3g} QPS" if self.kind == "at" else f"{self.kind} {self.qps:.3g} QPS"


@dataclass(frozen=True, slots=True)
class Point:
    """One level of a curve: its load, its rate on the QPS axis, and its latency (infinite: requests fail)."""

    load: float
    rate: float
    seconds: float


def capacity(figures: Sequence[LevelFigures], limit: SloLimit) -> Crossing:
    """Where the levels of one endpoint cross a limit, by monotone interpolation between them.

    Client-limited levels do not count. A level where a larger share of requests fails than the percentile leaves out
    is past the limit whatever its survivors measured. Nothing beyond the first over-saturated level counts, and that
    level itself only if it is past the limit: its latency depends on how long it ran.
    """
    levels = steady_levels(figures, limit)
    endpoint = figures[0].endpoint if figures else ""
    kind, qps = _cross(_points(levels, limit, [level.value(limit.figure) for level in levels]), limit)
    return Crossing(endpoint, limit, kind, qps, _interval(levels, limit, kind), _note(levels, limit, kind, qps))


def capacity_by_repeat(figures: Sequence[LevelFigures], limit: SloLimit) -> dict[int, float]:
    """The crossing of each repeat by itself; those that never cross are left out."""
    levels = steady_levels(figures, limit)
    found = {}
    for repeat in sorted({run.repeat for level in levels for run in level.runs}):
        kind, qps = _cross(_points(levels, limit, [_of_repeat(level, limit, repeat) for level in levels]), limit)
        if kind == "at" and qps is not None:
            found[repeat] = qps
    return found


def steady_levels(figures: Sequence[LevelFigures], limit: SloLimit) -> list[LevelFigures]:
    """The levels that can tell where the limit is crossed, from the lightest."""
    levels = sorted(
        (level for level in figures if not level.client_limited),
        key=lambda level: (level.load.qps or 0.0, level.load.concurrency or 0),
    )
    for place, level in enumerate(levels):
        if level.oversaturated:
            return levels[: place + 1] if _is_past(level, limit) else levels[:place]
    return levels


def fails(level: LevelFigures, limit: SloLimit) -> bool:
    """Whether more requests fail than the limit's percentile leaves out."""
    return level.failed > (1 - limit.share) * level.requests


def _is_past(level: LevelFigures, limit: SloLimit) -> bool:
    value = level.value(limit.figure)
    return fails(level, limit) or (value is not None and value > limit.seconds)


def _of_repeat(level: LevelFigures, limit: SloLimit, repeat: int) -> float | None:
    return next((run.values[limit.figure] for run in level.runs if run.repeat == repeat), None)


def _points(levels: Sequence[LevelFigures], limit: SloLimit, values: Sequence[float | None]) -> list[Point]:
    """The levels as a curve up to the first that fails; those without a value are left out."""
    points: list[Point] = []
    for level, value in zip(levels, values, strict=True):
        load = level.load.qps or float(level.load.concurrency or 0)
        if fails(level, limit) and (value is None or value <= limit.seconds):
            return [*points, Point(load, level.rate, math.inf)]
        if value is not None:
            points.append(Point(load, level.rate, value))
    return points


def _cross(points: list[Point], limit: SloLimit) -> tuple[Kind, float | None]:
    """How and where a curve crosses the limit; before a failing level it is the last level that keeps it."""
    finite = [point for point in points if math.isfinite(point.seconds)]
    if not points:
        return "unknown", None
    rises = isotonic(np.array([math.log(max(point.seconds, 1e-9)) for point in finite]))
    line = math.log(limit.seconds)
    if not finite or rises[0] > line:
        return "below", points[0].rate
    if not (rises > line).any():
        return ("above" if len(finite) == len(points) else "at"), finite[-1].rate
    loads, rates = (np.array([getattr(point, name) for point in finite]) for name in ("load", "rate"))
    return "at", float(np.interp(monotone_crossing(loads, rises, line), loads, rates))


def isotonic(values: Floats) -> Floats:
    """The rising series nearest to the values: neighbours that fall are replaced by their mean until none does."""
    groups: list[tuple[float, int]] = []
    for value in values.tolist():
        groups.append((value, 1))
        while len(groups) > 1 and groups[-2][0] > groups[-1][0]:
            (a, m), (b, n) = groups[-2:]
            groups[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return np.repeat([value for value, _ in groups], [count for _, count in groups]).astype(np.float64)


def monotone_crossing(places: Floats, values: Floats, line: float) -> float:
    """Where the monotone cubic through rising points passes `line`, which lies between the first and the last value."""
    after = int(np.argmax(values > line))
    before = after - 1
    slopes = monotone_slopes(places, values)
    width = places[after] - places[before]
    low, high = 0.0, 1.0
    for _ in range(60):
        t = (low + high) / 2
        value = (
            (1 + 2 * t) * (1 - t) ** 2 * values[before]
            + t * (1 - t) ** 2 * width * slopes[before]
            + t**2 * (3 - 2 * t) * values[after]
            + t**2 * (t - 1) * width * slopes[after]
        )
        low, high = (t, high) if value <= line else (low, t)
    return float(places[before] + low * width)


def monotone_slopes(places: Floats, values: Floats) -> Floats:
    """Slopes of a cubic that rises where its points rise (Fritsch and Butland, 1984); the ends go straight."""
    widths = np.diff(places)
    secants = np.diff(values) / widths
    slopes = np.concatenate((secants[:1], np.zeros(max(len(secants) - 1, 0)), secants[-1:]))
    for i in range(1, len(secants)):
        if min(secants[i - 1], secants[i]) > FLAT:
            left, right = 2 * widths[i] + widths[i - 1], widths[i] + 2 * widths[i - 1]
            slopes[i] = (left + right) / (left / secants[i - 1] + right / secants[i])
    return slopes


def _interval(levels: Sequence[LevelFigures], limit: SloLimit, kind: Kind) -> Interval | None:
    """From the crossings of the repeats, else from the curves through the ends of the levels' intervals."""
    if kind != "at":
        return None
    repeats = {run.repeat for level in levels for run in level.runs}
    found = capacity_by_repeat(levels, limit)
    if len(found) == len(repeats) > 1:
        logs = t_interval([math.log(qps) for qps in found.values()])
        return logs.mapped(np.exp) if logs else None
    low_kind, low = _cross(_points(levels, limit, [_end(level, limit, "high") for level in levels]), limit)
    high_kind, high = _cross(_points(levels, limit, [_end(level, limit, "low") for level in levels]), limit)
    if low is None or high is None or (low_kind, high_kind) != ("at", "at"):
        return None
    return Interval(low, high)


def _end(level: LevelFigures, limit: SloLimit, end: Literal["low", "high"]) -> float | None:
    interval = level.values[limit.figure].interval
    return getattr(interval, end) if interval else None


def _note(levels: Sequence[LevelFigures], limit: SloLimit, kind: Kind, qps: float | None) -> str:
    """What made the crossing, where it is not the limit itself."""
    beyond = [level for level in levels if qps is not None and level.rate > qps]
    if kind == "at" and beyond and fails(beyond[0], limit):
        return f"requests fail at {beyond[0].load.label}"
    if kind == "at" and beyond and beyond[0].oversaturated:
        return f"{beyond[0].load.label} is over-saturated"
    return ""
