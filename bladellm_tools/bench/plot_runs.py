"""What happened inside levels: distributions, requests in flight over time, and the tokens of single requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bladellm_tools.bench.columns import columns
from bladellm_tools.bench.metrics import LevelSummary
from bladellm_tools.bench.plot_style import LIGHT, Chart, drawing, finish, level_colours
from bladellm_tools.bench.stats import Floats, Samples
from bladellm_tools.bench.window import in_flight_over_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.5, 1.5, 1.5)))
MAX_LEVELS = 8
CDF_POINTS = 200
TIME_STEPS = 150
TIMELINE_REQUESTS = 40
TIMELINE_TOKENS = 6000
LOG_FROM = 20.0
STALL_FACTOR = 5.0
"""A gap this many times the run's median gap is drawn as a stall."""
TIMELINE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": LIGHT.series[4], "linewidth": 1.0, "label": "waits for the first token"},
    {"color": LIGHT.series[0], "linewidth": 0.6, "label": "tokens"},
    {"color": LIGHT.series[1], "linewidth": 2.2, "label": "stall"},
)


@dataclass(frozen=True)
class Trace:
    """One level's line in a chart."""

    label: str
    xs: Floats
    ys: Floats


def thinned(count: int) -> list[int]:
    """Which of `count` levels a chart shows: all, or `MAX_LEVELS` evenly chosen with both ends."""
    if count <= MAX_LEVELS:
        return list(range(count))
    return sorted({round(step * (count - 1) / (MAX_LEVELS - 1)) for step in range(MAX_LEVELS)})


def cdf_trace(label: str, sample: Samples) -> Trace:
    """The distribution of a metric in milliseconds, at most `CDF_POINTS` points, the tail kept."""
    shares = sample.cumulative / max(sample.total, 1.0)
    places = np.unique(np.searchsorted(shares, np.linspace(0, 1, CDF_POINTS), side="left").clip(0, len(shares) - 1))
    return Trace(label, sample.values[places] * 1e3, shares[places])


def draw_cdf(name: str, title: str, caption: str, x_label: str, traces: Sequence[Trace]) -> Chart:
    """Share of the values that are at most x, a line a level."""
    with drawing() as figure:
        axes = figure.subplots()
        axes.set_title(title)
        draw_traces(axes, traces)
        positive = [float(trace.xs[trace.xs > 0].min()) for trace in traces if (trace.xs > 0).any()]
        top = max((float(trace.xs[-1]) for trace in traces), default=0.0)
        if positive and top / min(positive) > LOG_FROM:
            set_log_x(axes)
        axes.set_ylim(0, 1.02)
        axes.axhline(0.99, color=LIGHT.limit, linewidth=0.9, linestyle=(0, (1, 1.5)))
        axes.annotate(
            "p99", (0, 0.99), (3, -9), xycoords=("axes fraction", "data"), textcoords="offset points", fontsize=8
        )
        axes.set_xlabel(x_label)
        axes.set_ylabel("share at most")
        legend(axes)
        return finish(figure, name, title, caption)


def set_log_x(axes: "Axes") -> None:
    """A logarithmic axis with whole numbers on it."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    subs = (1, 2, 5) if high / low < 60 else (1,)
    axes.xaxis.set_major_locator(LogLocator(base=10, subs=subs))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def draw_traces(axes: "Axes", traces: Sequence[Trace]) -> None:
    """Lines from light to heavy load, told apart by colour and by dashes."""
    for number, (trace, colour) in enumerate(zip(traces, level_colours(len(traces)), strict=True)):
        style = STYLES[number % len(STYLES)]
        axes.plot(trace.xs, trace.ys, color=colour, linestyle=style, linewidth=1.6, label=trace.label)


def legend(axes: "Axes") -> None:
    """Names of the levels to the right of the axes, heaviest on top as the lines usually lie."""
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(
        handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8.5,
        handlelength=2.4, borderaxespad=0.2,
    )  # fmt: skip


def in_flight_trace(label: str, level: LevelSummary) -> Trace:
    """Mean requests in flight over the time of a run, the drain included."""
    table = columns(level.run.requests)
    end = max(float(np.nanmax(table.left, initial=0.0)), level.run.duration)
    edges = np.linspace(0.0, end, TIME_STEPS + 1)
    return Trace(label, (edges[:-1] + edges[1:]) / 2, in_flight_over_time(table, edges))


def draw_in_flight(name: str, title: str, caption: str, traces: Sequence[Trace]) -> Chart:
    """Requests in flight over time, a line a level."""
    with drawing() as figure:
        axes = figure.subplots()
        axes.set_title(title)
        draw_traces(axes, traces)
        axes.set_xlabel("seconds since the level began")
        axes.set_ylabel("requests in flight")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        legend(axes)
        return finish(figure, name, title, caption)


def draw_timeline(name: str, title: str, caption: str, level: LevelSummary) -> Chart:
    """Requests of one run as rows: waiting for the first token, then every token; stalls are marked."""
    table = columns(level.run.requests)
    due = np.flatnonzero(level.window.holds(table.intended))
    first = max(0, (len(due) - TIMELINE_REQUESTS) // 2)
    chosen = due[first : first + TIMELINE_REQUESTS]
    stall = stall_length(table.chunk_time, table.chunk_row)
    waits, ticks, stalls = Strokes(), Strokes(), Strokes()
    with drawing() as figure:
        axes = figure.subplots()
        axes.set_title(title, pad=18)
        for row, request in enumerate(chosen):
            times = table.chunk_time[table.chunk_row == request]
            waits.horizontal(
                row, float(table.intended[request]), float(times[0] if len(times) else table.left[request])
            )
            for time in times[: TIMELINE_TOKENS // TIMELINE_REQUESTS]:
                ticks.vertical(row, float(time))
            for start in np.flatnonzero(np.diff(times) > stall):
                stalls.horizontal(row, float(times[start]), float(times[start + 1]))
            if not table.ok[request]:
                axes.plot([table.left[request]], [row], color=LIGHT.series[1], marker="x", linestyle="none")
        for strokes, style in zip((waits, ticks, stalls), TIMELINE_STYLES, strict=True):
            axes.plot(strokes.xs, strokes.ys, solid_capstyle="butt", **style)
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 0.99), ncols=3, fontsize=7.5, handlelength=1.4, columnspacing=0.9,
            borderaxespad=0.1,
        )  # fmt: skip
        axes.set_xlabel("seconds since the level began")
        axes.set_ylabel("request")
        axes.set_ylim(len(chosen) - 0.3, -0.7)
        axes.grid(visible=False, axis="y")
        return finish(figure, name, title, caption)


class Strokes:
    """Many short strokes as one path, which a picture holds in far less space than single marks."""

    def __init__(self) -> None:
        self.xs: list[float] = []
        self.ys: list[float] = []

    def horizontal(self, row: int, start: float, end: float) -> None:
        """A stroke along a row."""
        self.xs += [start, end, np.nan]
        self.ys += [row, row, np.nan]

    def vertical(self, row: int, time: float) -> None:
        """A tick across a row."""
        self.xs += [time, time, np.nan]
        self.ys += [row - 0.38, row + 0.38, np.nan]


def stall_length(times: Floats, rows: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]") -> float:
    """The gap from which a wait between two chunks counts as a stall; infinite where there are no gaps."""
    gaps = np.diff(times)[np.diff(rows) == 0]
    return STALL_FACTOR * float(np.median(gaps)) if len(gaps) else float("inf")
