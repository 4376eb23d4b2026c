"""Two endpoints against each other: latency at equal load (vertical), load at equal latency (horizontal), in words.

Of closed loops also what as many streams get done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from bladellm_tools.bench.capacity import Crossing, capacity, capacity_by_repeat
from bladellm_tools.bench.figures import LevelFigures, level_figures
from bladellm_tools.bench.records import Benchmark, Load
from bladellm_tools.bench.slo import SloLimit
from bladellm_tools.bench.stats import Interval, paired_ratio, ratio_interval

VERTICAL = ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99")
RATES = {"requests_per_s": "requests/s", "output_tokens_per_s": "output tokens/s"}
"""Of closed loops alone, and how they are called: in open ones they are what was asked for."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """First endpoint over second. `bound` says when only one side of it is known."""

    value: float
    interval: Interval | None = None
    bound: Literal["", "at least", "at most"] = ""

    @property
    def inverse(self) -> "Ratio":
        """Second over first: of a latency, how many times lower the first one's is."""
        turned = Interval(1 / self.interval.high, 1 / self.interval.low) if self.interval else None
        bounds: dict[str, Literal["", "at least", "at most"]] = {"at least": "at most", "at most": "at least", "": ""}
        return Ratio(1 / self.value, turned, bounds[self.bound])

    @property
    def shows_difference(self) -> bool:
        """Whether the interval leaves out 1."""
        return self.interval is not None and not self.interval.contains(1.0)


@dataclass(frozen=True, slots=True)
class VerticalRow:
    """One figure at one level both endpoints ran. `mark` says why the ratio does not count, or is empty."""

    load: Load
    figure: str
    first: float | None
    second: float | None
    ratio: Ratio | None
    mark: str = ""


@dataclass(frozen=True, slots=True)
class HorizontalRow:
    """The QPS up to which each endpoint keeps a limit, and first over second."""

    limit: SloLimit
    first: Crossing
    second: Crossing
    ratio: Ratio | None


@dataclass(frozen=True, slots=True)
class Pair:
    """The first endpoint against one other. `rates`: `RATES` of the closed loops that both ran."""

    first: str
    second: str
    rates: tuple[VerticalRow, ...]
    vertical: tuple[VerticalRow, ...]
    horizontal: tuple[HorizontalRow, ...]

    @property
    def summary(self) -> list[str]:
        """The result in sentences: one a figure, one a limit."""
        names = [*(RATES if self.rates else ()), *VERTICAL]
        sentences = [figure_sentence(self, name) for name in names]
        return [*sentences, *(horizontal_sentence(self, row) for row in self.horizontal)]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every level, and the first endpoint against each of the others."""

    figures: tuple[LevelFigures, ...]
    pairs: tuple[Pair, ...]


def compare(benchmark: Benchmark, slo: Sequence[SloLimit]) -> Comparison:
    """All levels of all endpoints, and the ratios of the first endpoint to each other one."""
    figures = level_figures(benchmark, slo)
    by_endpoint = {name: [level for level in figures if level.endpoint == name] for name in benchmark.endpoints}
    first, *others = benchmark.endpoints or [""]
    pairs = tuple(compare_pair(by_endpoint[first], by_endpoint[other], slo) for other in others)
    return Comparison(tuple(figures), pairs)


def compare_pair(first: Sequence[LevelFigures], second: Sequence[LevelFigures], slo: Sequence[SloLimit]) -> Pair:
    """The levels of one endpoint against those of another."""
    other = {level.load: level for level in second}
    common = [(level, other[level.load]) for level in first if level.load in other]
    rates = tuple(_vertical(a, b, name) for a, b in common if a.load.concurrency for name in RATES)
    vertical = tuple(_vertical(a, b, name) for a, b in common for name in VERTICAL)
    horizontal = tuple(_horizontal(first, second, limit) for limit in slo)
    return Pair(first[0].endpoint, second[0].endpoint, rates, vertical, horizontal)


def _vertical(first: LevelFigures, second: LevelFigures, name: str) -> VerticalRow:
    a, b = first.value(name), second.value(name)
    ratio = None
    if a and b and not (first.client_limited or second.client_limited):
        ratio = _figure_ratio(first, second, name, a, b)
    return VerticalRow(first.load, name, a, b, ratio, _mark(first, second, ratio))


def _mark(first: LevelFigures, second: LevelFigures, ratio: Ratio | None) -> str:
    marks = [f"{level.endpoint} {level.marks}" for level in (first, second) if level.marks]
    if not marks and ratio is None:
        return "too few completions"
    return ", ".join(marks)


def _figure_ratio(first: LevelFigures, second: LevelFigures, name: str, a: float, b: float) -> Ratio:
    """By pairs of repeats where two or more are common to both, else from the two intervals."""
    above = {run.repeat: run.values[name] for run in first.runs}
    below = {run.repeat: run.values[name] for run in second.runs}
    pairs = [(x, y) for repeat, x in above.items() if x and (y := below.get(repeat))]
    if len(pairs) > 1:
        return Ratio(*paired_ratio([x for x, _ in pairs], [y for _, y in pairs]))
    over, under = first.values[name].interval, second.values[name].interval
    return Ratio(a / b, ratio_interval(a, over, b, under))


def _horizontal(first: Sequence[LevelFigures], second: Sequence[LevelFigures], limit: SloLimit) -> HorizontalRow:
    a, b = capacity(first, limit), capacity(second, limit)
    return HorizontalRow(limit, a, b, _capacity_ratio(first, second, a, b))


def _capacity_ratio(
    first: Sequence[LevelFigures], second: Sequence[LevelFigures], a: Crossing, b: Crossing
) -> Ratio | None:
    """Ratio of two crossings; a bound where one was not seen, nothing where neither was."""
    if not a.qps or not b.qps:
        return None
    ratio = a.qps / b.qps
    if (a.kind, b.kind) == ("at", "at"):
        above, below = capacity_by_repeat(first, a.limit), capacity_by_repeat(second, a.limit)
        common = above.keys() & below.keys()
        if len(common) > 1 and len(common) == max(len(above), len(below)):
            order = sorted(common)
            return Ratio(*paired_ratio([above[repeat] for repeat in order], [below[repeat] for repeat in order]))
        return Ratio(ratio, ratio_interval(a.qps, a.interval, b.qps, b.interval))
    if a.kind in ("at", "above") and b.kind in ("at", "below"):
        return Ratio(ratio, bound="at least")
    if a.kind in ("at", "below") and b.kind in ("at", "above"):
        return Ratio(ratio, bound="at most")
    return None


def figure_title(name: str) -> str:
    """`ttft_p99` as `TTFT p99`, a rate as `RATES` says."""
    metric, _, statistic = name.rpartition("_")
    return RATES.get(name) or f"{metric.upper()} {statistic}"


def times(ratio: float) -> str:
    """A ratio with three digits: `1.98×`."""
    return f"{ratio:.3g}×"


def figure_sentence(pair: Pair, name: str) -> str:
    """`TTFT p99 of A is 1.9–2.1× lower than of B between 1 and 8 QPS.`; levels that do not count are left out."""
    rows = [row for row in (*pair.rates, *pair.vertical) if row.figure == name and not row.mark and row.ratio]
    title = figure_title(name)
    if not rows:
        return f"{title}: no level tells {pair.first} and {pair.second} apart."
    where = _where(rows)
    ratios = [row.ratio for row in rows if row.ratio]
    if not any(ratio.shows_difference for ratio in ratios):
        low, high = min(ratio.value for ratio in ratios), max(ratio.value for ratio in ratios)
        said = f"{title} of {pair.first} over {pair.second} is {_span(low, high)} {where}: no level shows a difference"
        return "; ".join([said, *_too_short(ratios)]) + "."
    return f"{title} of {pair.first} is {_lower(ratios)} than of {pair.second} {where}{_unsure(ratios)}."


def _lower(ratios: list[Ratio]) -> str:
    """The range of ratios in words, with 'lower' or 'higher' as they are."""
    low, high = min(ratio.value for ratio in ratios), max(ratio.value for ratio in ratios)
    if high <= 1:
        return f"{_span(1 / high, 1 / low)} lower"
    if low >= 1:
        return f"{_span(low, high)} higher"
    return f"from {times(1 / low)} lower to {times(high)} higher"


def _span(low: float, high: float) -> str:
    return times(low) if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g}–{times(high)}"


def _unsure(ratios: list[Ratio]) -> str:
    """How many of the levels do not carry the claim by themselves, and why."""
    unknown = sum(ratio.interval is None for ratio in ratios)
    equal = sum(not ratio.shows_difference for ratio in ratios) - unknown
    parts = [f"{equal} of {len(ratios)} levels show no difference"] if equal else []
    parts += _too_short(ratios)
    return f" ({'; '.join(parts)})" if parts else ""


def _too_short(ratios: list[Ratio]) -> list[str]:
    """That some levels have no interval, if it is so."""
    unknown = sum(ratio.interval is None for ratio in ratios)
    text = f"{unknown} of {len(ratios)} levels are too short for an interval: more --repeats give one"
    return [text] if unknown else []


def _where(rows: list[VerticalRow]) -> str:
    """`between 1 and 8 QPS` or `at 4 QPS`."""
    first, last = rows[0].load, rows[-1].load
    if first == last:
        return f"at {first.label}"
    return f"between {first.label.split()[0]} and {last.label}"


def horizontal_sentence(pair: Pair, row: HorizontalRow) -> str:
    """`A carries 2.03× the QPS of B at TTFT p99 ≤ 500 ms (8.1 QPS against 4 QPS).`"""
    against = f"({row.first.text} against {row.second.text})"
    if row.ratio is None:
        return f"{row.limit.text}: the levels do not give a ratio of {pair.first} to {pair.second} {against}."
    bound = f"{row.ratio.bound} " if row.ratio.bound else ""
    interval = row.ratio.interval
    span = f", 95 % interval {interval.low:.3g}–{interval.high:.3g}" if interval else ""
    gain = f"{bound}{times(row.ratio.value)} the QPS of {pair.second}"
    return f"{pair.first} carries {gain} at {row.limit.text} {against}{span}."
