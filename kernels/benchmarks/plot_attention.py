"""Draw attention time a token over context length, a line a KV format, beside another engine's times.

    python kernels/benchmarks/plot_attention.py RESULTS.json PICTURE.png [--peer PEER.json] [--shape "Llama-2-13B"]

RESULTS.json is a list of measured decode attentions, one query token of one sequence, in any order:

    [{"format": "int8", "context": 8192, "microseconds_per_layer": 41.5, "layers": 40}, ...]

The picture shows microseconds_per_layer * layers. PEER.json is a list of another engine's times, drawn as they are; the
name should say what they are the times of:

    [{"name": "vLLM 0.26.0 bf16, whole step", "context": 8192, "milliseconds": 9.51}, ...]

The ending of PICTURE chooses the kind: .png (1400 pixels wide, for a page of 700) or .svg.
"""

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bladellm_tools.bench.plot_style import LIGHT, MARKERS, PNG_DPI, drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("no_quant", "int8", "int4", "fp8_e4m3", "int8_affine", "int4_affine", "fp8_e5m2")
"""In this order formats take colours and markers, the same ones in every picture."""
LABELS = {"no_quant": "unquantized"}
INCHES = (7.0, 4.4)


@dataclass(frozen=True, slots=True)
class Line:
    """Times of one format, or of the peer: (context in tokens, milliseconds a token), contexts ascending."""

    label: str
    points: list[tuple[int, float]]
    colour: str
    marker: str
    peer: bool = False


def attention_lines(results: list[dict[str, Any]]) -> list[Line]:
    """A line a format. ValueError for a format that does not exist and for two results of one point."""
    times: dict[str, dict[int, float]] = {}
    for result in results:
        name, context = str(result["format"]), int(result["context"])
        if name not in FORMATS:
            raise ValueError(f"{name} is no KV format; there are {', '.join(FORMATS)}")
        milliseconds = result["microseconds_per_layer"] * result["layers"] / 1e3
        _add(times.setdefault(name, {}), name, context, milliseconds)
    order = sorted(times, key=FORMATS.index)
    styles = {name: (LIGHT.series[FORMATS.index(name)], MARKERS[FORMATS.index(name)]) for name in order}
    return [Line(LABELS.get(name, name), sorted(times[name].items()), *styles[name]) for name in order]


def peer_lines(results: list[dict[str, Any]]) -> list[Line]:
    """A line a name. ValueError for two results of one point."""
    times: dict[str, dict[int, float]] = {}
    for result in results:
        name = str(result["name"])
        _add(times.setdefault(name, {}), name, int(result["context"]), float(result["milliseconds"]))
    return [Line(name, sorted(points.items()), LIGHT.limit, "o", peer=True) for name, points in times.items()]


def _add(points: dict[int, float], name: str, context: int, milliseconds: float) -> None:
    if context in points:
        raise ValueError(f"{name} has two results at a context of {context}")
    if context <= 0 or not math.isfinite(milliseconds) or milliseconds <= 0:
        raise ValueError(f"{name} has no time at a context of {context}: {milliseconds}")
    points[context] = milliseconds


def draw(lines: list[Line], title: str, path: Path) -> None:
    """Write the picture, as PNG or SVG by the path's ending."""
    from matplotlib.ticker import FuncFormatter

    with drawing() as figure:
        figure.set_size_inches(INCHES)
        axes = figure.subplots()
        axes.set_title(title)
        # Steepest first: the legend's order is that of the lines from above.
        for line in sorted(lines, key=_steepness, reverse=True):
            _draw_line(axes, line)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1000:g}K" if value else "0"))
        axes.set_xlabel("context (tokens)")
        axes.set_ylabel("ms a token")
        # Below the axes: names of peers are long, and lines fill the picture in any direction.
        figure.legend(loc="outside lower center", ncols=4, handlelength=2.5, columnspacing=1.6)
        figure.savefig(path, dpi=PNG_DPI, facecolor=LIGHT.paper)


def _draw_line(axes: "Axes", line: Line) -> None:
    """Formats are solid with filled markers, the peer is dashed with hollow ones."""
    axes.plot(
        *zip(*line.points, strict=True), label=line.label, color=line.colour, marker=line.marker, clip_on=False,
        linestyle=(0, (4, 2)) if line.peer else "solid", linewidth=1.2 if line.peer else 1.8,
        markerfacecolor=LIGHT.paper if line.peer else line.colour,
    )  # fmt: skip


def _steepness(line: Line) -> float:
    """Milliseconds a token of context, at the line's end."""
    context, milliseconds = line.points[-1]
    return milliseconds / context


def main() -> None:
    args = _arguments().parse_args()
    lines = attention_lines(json.loads(args.results.read_text()))
    if args.peer is not None:
        lines += peer_lines(json.loads(args.peer.read_text()))
    draw(lines, f"Decode attention over context, {args.shape}, batch 1", args.picture)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="measured attention times, JSON")
    parser.add_argument("picture", type=Path, help="file to write, .png or .svg")
    parser.add_argument("--peer", type=Path, help="another engine's times, JSON")
    parser.add_argument("--shape", default="Llama-2-13B", help="the model, for the title")
    return parser


if __name__ == "__main__":
    main()
