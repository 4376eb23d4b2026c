"""Curves over levels of load: a line a server and percentile, with its interval, limits and where they are crossed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from bladellm_tools.bench.plot_style import LIGHT, Chart, drawing, finish, series_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOG_FROM = 12.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
LINE_HEIGHT = 0.062
"""Least distance of two labels, as a share of the axes' height."""


@dataclass(frozen=True)
class Point:
    """One level: load, value, interval; `hollow` for no steady state, `faded` for figures of the client."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    faded: bool = False


@dataclass(frozen=True)
class Line:
    """One server's curve. `series` numbers the server: it chooses colour and marker."""

    label: str
    series: int
    points: list[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Limit:
    """A horizontal line, and per series the load at which the curve crosses it."""

    label: str
    y: float
    crossings: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CurveChart:
    """What a chart of curves shows. `diagonal` draws y = x, for what would be ideal."""

    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    lines: list[Line]
    limits: list[Limit] = field(default_factory=list)
    diagonal: bool = False
    log: bool = True


def draw_curves(chart: CurveChart) -> Chart:
    """Draw it."""
    with drawing() as figure:
        axes = figure.subplots()
        axes.set_title(chart.title)
        axes.set_xlabel(chart.x_label)
        axes.set_ylabel(chart.y_label)
        for line in chart.lines:
            draw_line(axes, line)
        set_scales(axes, chart)
        if chart.diagonal:
            top = max(axes.get_xlim()[1], 0)
            axes.plot([0, top], [0, top], color=LIGHT.limit, linewidth=1, linestyle=(0, (1, 2)), zorder=1)
        for limit in chart.limits:
            draw_limit(axes, limit)
        label_ends(axes, [line for line in chart.lines if line.points])
        return finish(figure, chart.name, chart.title, chart.caption)


def draw_line(axes: "Axes", line: Line) -> None:
    """The curve, its interval band, and its points."""
    colour, marker = series_style(line.series)
    xs, ys = [point.x for point in line.points], [point.y for point in line.points]
    axes.plot(xs, ys, color=colour, linestyle=(0, (4, 2)) if line.dashed else "solid", zorder=3)
    banded = [point for point in line.points if point.low is not None and point.high is not None]
    if banded:
        lows, highs = [point.low or 0.0 for point in banded], [point.high or 0.0 for point in banded]
        axes.fill_between([point.x for point in banded], lows, highs, color=colour, alpha=0.16, linewidth=0, zorder=2)
    for hollow, faded in product((False, True), repeat=2):
        chosen = [point for point in line.points if (point.hollow, point.faded) == (hollow, faded)]
        axes.plot(
            [point.x for point in chosen],
            [point.y for point in chosen],
            color=colour,
            marker=marker,
            linestyle="none",
            markerfacecolor=LIGHT.paper if hollow else colour,
            markeredgewidth=1.4,
            alpha=0.35 if faded else None,
            zorder=4,
        )


def set_scales(axes: "Axes", chart: CurveChart) -> None:
    """Axes from 0, or logarithmic where the values span more than an order of magnitude."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    points = [point for line in chart.lines for point in line.points]
    right = max((point.x for point in points), default=0.0)
    heights = [point.y for point in points if point.y > 0] + [limit.y for limit in chart.limits]
    axes.set_xlim(0, right * 1.04 if right > 0 else 1)
    if not heights:
        axes.set_ylim(0, 1)
    elif chart.log and max(heights) / min(heights) > LOG_FROM:
        axes.set_yscale("log")
        axes.set_ylim(min(heights) / 1.4, max(heights) * 1.6)
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, max(heights) * 1.15)


def draw_limit(axes: "Axes", limit: Limit) -> None:
    """A limit as a dotted line with its name, and a dropped line with the load at every crossing."""
    axes.axhline(limit.y, color=LIGHT.limit, linewidth=1.1, linestyle=(0, (1, 1.5)), zorder=2)
    axes.annotate(
        limit.label, (0, limit.y), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
        fontsize=8, color=LIGHT.limit, zorder=5,
    )  # fmt: skip
    for rank, (series, load) in enumerate(sorted(limit.crossings.items(), key=lambda item: item[1])):
        colour, _ = series_style(series)
        axes.plot([load, load], [axes.get_ylim()[0], limit.y], color=colour, linewidth=1, linestyle=(0, (1, 1)))
        axes.plot([load], [limit.y], color=colour, marker="x", markersize=7, markeredgewidth=2, zorder=6)
        axes.annotate(
            f"{load:.3g}", (load, axes.get_ylim()[0]), (-3, 3 + 10 * rank), textcoords="offset points", ha="right",
            fontsize=8, color=colour, fontweight="bold", zorder=6,
        )  # fmt: skip


def label_ends(axes: "Axes", lines: Sequence[Line]) -> None:
    """Names at the right ends of the lines, pushed apart where they would touch."""
    if not lines:
        return
    heights = [float(axes.transAxes.inverted().transform(end_on_screen(axes, line))[1]) for line in lines]
    for line, wanted, height in zip(lines, heights, spread(heights, LINE_HEIGHT), strict=True):
        colour, _ = series_style(line.series)
        end = line.points[-1]
        axes.annotate(
            line.label, (end.x, end.y), (1.03, height), xycoords="data", textcoords="axes fraction", va="center",
            fontsize=8.5, color=colour, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
            if abs(wanted - height) > LINE_HEIGHT / 4 or end.x < axes.get_xlim()[1] * 0.9 else None,
        )  # fmt: skip


def end_on_screen(axes: "Axes", line: Line) -> tuple[float, float]:
    """Where the last point of a line is drawn."""
    x, y = axes.transData.transform((line.points[-1].x, line.points[-1].y))
    return float(x), float(y)


def spread(wanted: Sequence[float], distance: float) -> list[float]:
    """Places near the wanted ones, at least `distance` apart, in the same order and about the same middle."""
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    groups: list[tuple[float, list[int]]] = []
    for number in order:
        centre, members = wanted[number], [number]
        while groups and groups[-1][0] + distance * (len(groups[-1][1]) + len(members)) / 2 > centre:
            before, others = groups.pop()
            centre = (before * len(others) + centre * len(members)) / (len(others) + len(members))
            members = others + members
        groups.append((centre, members))
    placed = [math.nan] * len(wanted)
    for centre, members in groups:
        for rank, number in enumerate(members):
            placed[number] = centre + distance * (rank - (len(members) - 1) / 2)
    return placed
