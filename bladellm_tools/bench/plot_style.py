"""How charts look: colours that colour-blind readers and printers keep apart, markers, sizes, and themes of an SVG.

Every colour is used in one role only, so that an SVG's colours can become CSS variables: one drawing, light and dark.
"""

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SIZE = (4.3, 3.1)
"""Inches: three fit side by side on a wide screen, one fills a telephone without shrinking its text much."""
PNG_DPI = 200


@dataclass(frozen=True)
class Theme:
    """Colours by role: paper, text, quiet lines, limits, one a server, and levels from little to much load."""

    paper: str
    ink: str
    quiet: str
    limit: str
    series: tuple[str, ...]
    levels: tuple[str, ...]

    @property
    def variables(self) -> dict[str, str]:
        """CSS variable names and colours."""
        single = {"paper": self.paper, "ink": self.ink, "quiet": self.quiet, "limit": self.limit}
        series = {f"series{number}": colour for number, colour in enumerate(self.series)}
        levels = {f"level{number}": colour for number, colour in enumerate(self.levels)}
        return {f"--{name}": colour for name, colour in (single | series | levels).items()}


LIGHT = Theme(
    paper="#fefefe",
    ink="#1f2328",
    quiet="#d0d4da",
    limit="#5b626b",
    series=("#0072b2", "#d55e00", "#008a66", "#b0508f", "#8a6d00", "#2b8fc4", "#7a4fbf", "#404850"),
    levels=("#7db8da", "#58a5c8", "#3f90b5", "#2f7aa3", "#27648f", "#234f7b", "#203b66", "#1b2750"),
)
DARK = Theme(
    paper="#15181c",
    ink="#e6e9ed",
    quiet="#3b424b",
    limit="#a3abb5",
    series=("#56b4e9", "#ff9248", "#2fcf9f", "#e79ac6", "#e8c547", "#8fd0f5", "#b79cf2", "#c4ccd6"),
    levels=("#3d5f86", "#4a76a0", "#568db5", "#65a3c6", "#7ab8d3", "#95cbdd", "#b3dde7", "#d4eef2"),
)

SETTINGS: Any = {
    "font.size": 9.0,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": LIGHT.limit,
    "axes.labelcolor": LIGHT.ink,
    "axes.titlecolor": LIGHT.ink,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT.quiet,
    "grid.linewidth": 0.6,
    "text.color": LIGHT.ink,
    "xtick.color": LIGHT.limit,
    "ytick.color": LIGHT.limit,
    "xtick.labelcolor": LIGHT.ink,
    "ytick.labelcolor": LIGHT.ink,
    "lines.linewidth": 1.7,
    "lines.markersize": 5.0,
    "figure.figsize": SIZE,
    "figure.facecolor": "none",
    "text.parse_math": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "bladellm",
    "legend.frameon": False,
}


@contextmanager
def drawing() -> Iterator["Figure"]:
    """A figure in this style, without any window system; released afterwards."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS):
        figure = Figure(layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def series_style(number: int) -> tuple[str, str]:
    """Colour and marker of the n-th server."""
    return LIGHT.series[number % len(LIGHT.series)], MARKERS[number % len(MARKERS)]


def level_colours(count: int) -> list[str]:
    """`count` colours from light to dark load, as far apart as they can be."""
    last = len(LIGHT.levels) - 1
    return [LIGHT.levels[round(number * last / max(count - 1, 1))] for number in range(count)]


@dataclass(frozen=True)
class Chart:
    """A finished chart: a file name without ending, a title, what it shows in a sentence, and both pictures."""

    name: str
    title: str
    caption: str
    svg: str
    png: bytes


def finish(figure: "Figure", name: str, title: str, caption: str) -> Chart:
    """Both pictures of a figure."""
    svg, png = io.StringIO(), io.BytesIO()
    # Laid out once, not again for each of the two pictures, and without drawing it for that.
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.execute(figure)
    figure.set_layout_engine(None)
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    figure.savefig(png, format="png", dpi=PNG_DPI, facecolor=LIGHT.paper, metadata={"Software": None})
    return Chart(name, title, caption, themed(svg.getvalue(), name, title), png.getvalue())


def themed(svg: str, name: str, title: str) -> str:
    """An SVG for a page: no prolog, its own identifiers, colours from the page's variables, any width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    for before in (' id="', 'href="#', "url(#"):
        svg = svg.replace(before, f"{before}{name}-")
    for variable, colour in LIGHT.variables.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{title}"', 1)
