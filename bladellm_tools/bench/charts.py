"""Which charts a report has, made from the figures of its levels."""

from collections.abc import Iterator, Sequence

from bladellm_tools.bench.figures import LevelFigures
from bladellm_tools.bench.metrics import LevelSummary, pooled_samples
from bladellm_tools.bench.plot_curves import CurveChart, Limit, Line, Point, draw_curves
from bladellm_tools.bench.plot_runs import (
    Trace,
    cdf_trace,
    draw_cdf,
    draw_in_flight,
    draw_timeline,
    in_flight_trace,
    thinned,
)
from bladellm_tools.bench.plot_style import Chart
from bladellm_tools.bench.slo import SloLimit

PERCENTILES = ("p50", "p99")
CURVE_CAPTION = (
    "p50 solid, p99 dashed, with 95 % intervals. Hollow: over-saturated, no steady state. Faded: the "
    "client was the limit. "
    "p99 needs 200 completed requests."
)
Crossings = dict[SloLimit, dict[str, float]]
"""Per limit, the load at which each endpoint's curve crosses it; endpoints that never cross are left out."""


def curve_charts(levels: Sequence[LevelFigures], slo: Sequence[SloLimit], crossings: Crossings) -> list[Chart]:
    """The two curves that matter, TTFT and TBT over load; then latency over throughput, and goodput."""
    x_label = load_label(levels)
    charts = [
        CurveChart(
            f"{metric}_over_load", f"{metric.upper()} over load", CURVE_CAPTION, x_label, f"{metric.upper()} (ms)",
            lines_of(levels, metric), limits_of(levels, slo, metric, crossings),
        )
        for metric in ("ttft", "tbt")
    ]  # fmt: skip
    charts.append(
        CurveChart(
            "latency_over_throughput",
            "Latency over throughput",
            "Whole requests, from their intended send. p50 solid, p99 dashed.",
            "output tokens a second",
            "end to end (ms)",
            lines_of(levels, "e2e", x_figure="output_tokens_per_s"),
            limits_of(levels, slo, "e2e", {}),
        )
    )
    goodput = lines_of_figure(levels, "goodput")
    if any(line.points for line in goodput):
        kept = " and ".join(limit.text for limit in slo)
        charts.append(
            CurveChart(
                "goodput_over_load",
                "Goodput over load",
                f"Requests a second that keep {kept} each for itself; dotted: all of them. A failure keeps nothing.",
                x_label,
                "good requests a second",
                goodput,
                diagonal=is_open(levels),
                log=False,
            )
        )
    return [draw_curves(chart) for chart in charts]


def is_open(levels: Sequence[LevelFigures]) -> bool:
    """Whether load is a rate of arrivals, not a number of streams."""
    return all(level.load.qps is not None for level in levels)


def load_label(levels: Sequence[LevelFigures]) -> str:
    """What the load axis counts."""
    return "requests a second (QPS)" if is_open(levels) else "requests a second (achieved)"


def endpoints_of(levels: Sequence[LevelFigures]) -> list[str]:
    """Endpoint names in order."""
    return list(dict.fromkeys(level.endpoint for level in levels))


def lines_of(levels: Sequence[LevelFigures], metric: str, x_figure: str | None = None) -> list[Line]:
    """p50 and p99 of a metric in milliseconds, per endpoint."""
    return [
        Line(f"{endpoint} {percentile}", number, points_of(levels, endpoint, f"{metric}_{percentile}", 1e3, x_figure),
             dashed=percentile == "p99")
        for number, endpoint in enumerate(endpoints_of(levels))
        for percentile in PERCENTILES
    ]  # fmt: skip


def lines_of_figure(levels: Sequence[LevelFigures], figure: str) -> list[Line]:
    """One figure, per endpoint."""
    return [
        Line(endpoint, number, points_of(levels, endpoint, figure, 1.0, None))
        for number, endpoint in enumerate(endpoints_of(levels))
    ]


def points_of(
    levels: Sequence[LevelFigures], endpoint: str, figure: str, scale: float, x_figure: str | None
) -> list[Point]:
    """An endpoint's levels as points."""
    points = []
    for level in levels:
        found = level.values[figure]
        x = level.rate if x_figure is None else level.value(x_figure)
        if level.endpoint != endpoint or found.value is None or x is None:
            continue
        low, high = (found.interval.low, found.interval.high) if found.interval else (None, None)
        points.append(
            Point(
                x,
                found.value * scale,
                max(low * scale, 0.0) if low is not None else None,
                high * scale if high is not None else None,
                level.oversaturated,
                level.client_limited,
            )
        )
    return points


def limits_of(
    levels: Sequence[LevelFigures], slo: Sequence[SloLimit], metric: str, crossings: Crossings
) -> list[Limit]:
    """The limits of a metric, and where the curves cross them."""
    numbers = {endpoint: number for number, endpoint in enumerate(endpoints_of(levels))}
    return [
        Limit(
            f"{limit.percentile} ≤ {limit.text.split('≤ ')[1]}",
            limit.seconds * 1e3,
            {numbers[endpoint]: load for endpoint, load in crossings.get(limit, {}).items()},
        )
        for limit in slo
        if limit.metric == metric
    ]


def run_charts(levels: Sequence[LevelFigures]) -> list[Chart]:
    """Per endpoint: distributions of TTFT and TBT, requests in flight over time, and a timeline of tokens."""
    return [
        chart
        for number, endpoint in enumerate(endpoints_of(levels))
        for chart in endpoint_charts(number, endpoint, [level for level in levels if level.endpoint == endpoint])
    ]


def endpoint_charts(number: int, endpoint: str, levels: list[LevelFigures]) -> Iterator[Chart]:
    """The charts of one endpoint's levels."""
    shown = [levels[place] for place in thinned(len(levels))]
    samples = [(level.load.label, pooled_samples(level.runs)) for level in shown]
    for metric, what in (("ttft", "answers"), ("tbt", "tokens")):
        traces = [cdf_trace(label, found[metric]) for label, found in samples if found[metric].total]
        if traces:
            yield draw_cdf(
                f"{metric}_cdf_{number}", f"{metric.upper()} of every level: {endpoint}",
                f"Share of {what} within x milliseconds, all repeats together.", f"{metric.upper()} (ms)", traces,
            )  # fmt: skip
    flights: list[Trace] = [in_flight_trace(level.load.label, level.runs[0]) for level in shown]
    yield draw_in_flight(
        f"in_flight_{number}", f"Requests in flight: {endpoint}",
        "First repeat of every level. A line that keeps rising is over-saturation.", flights,
    )  # fmt: skip
    chosen = timeline_level(levels)
    if chosen is not None:
        yield draw_timeline(
            f"timeline_{number}", f"Timeline at {chosen.load.label}: {endpoint}",
            "Requests from the middle of the first repeat, from their intended send. × ended in an error.", chosen,
        )  # fmt: skip


def timeline_level(levels: Sequence[LevelFigures]) -> LevelSummary | None:
    """The heaviest steady level with answers, else the lightest one with any."""
    answered = [level for level in levels if level.completed]
    steady = [level for level in answered if not level.oversaturated]
    chosen = steady[-1:] or answered[:1]
    return chosen[0].runs[0] if chosen else None
