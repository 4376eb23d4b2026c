"""Everything a finished benchmark leaves: files in its folder, and the text that is printed."""

from collections.abc import Sequence
from pathlib import Path

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.capacity import Crossing, capacity
from bladellm_tools.bench.charts import Crossings, curve_charts, endpoints_of, is_open, run_charts
from bladellm_tools.bench.compare import Comparison, compare
from bladellm_tools.bench.compat import vllm_text
from bladellm_tools.bench.figures import LevelFigures
from bladellm_tools.bench.plot_style import Chart
from bladellm_tools.bench.records import Benchmark
from bladellm_tools.bench.report_html import make_html
from bladellm_tools.bench.slo import SloLimit
from bladellm_tools.bench.storage import save
from bladellm_tools.bench.tables import curve_text, level_text, pair_text

REPORT = "report.html"
CHARTS = "charts"


def make_report(benchmark: Benchmark, slo: Sequence[SloLimit], folder: Path, *, store: bool, vllm_names: bool) -> str:
    """Write the report and its charts, with `store` the results too; returns the text to print."""
    comparison = compare(benchmark, slo)
    if store:
        save(benchmark, folder, comparison.figures)
    crossings = find_crossings(comparison.figures, slo)
    curves = curve_charts(comparison.figures, slo, crossing_places(crossings))
    runs = run_charts(comparison.figures)
    html = make_html(benchmark, comparison, crossings, curves, runs)
    write_files(folder, html, [*curves, *runs])
    return text_report(benchmark, comparison, crossings, vllm_names) + f"\n\nreport: {folder / REPORT}"


def write_files(folder: Path, html: str, charts: Sequence[Chart]) -> None:
    """The HTML file, and a PNG a chart. Raises `UserError` where the folder cannot be written."""
    try:
        (folder / CHARTS).mkdir(parents=True, exist_ok=True)
        (folder / REPORT).write_text(html, encoding="utf-8", errors="replace")
        for chart in charts:
            (folder / CHARTS / f"{chart.name}.png").write_bytes(chart.png)
    except OSError as error:
        raise UserError(f"the report cannot be written to {folder}: {error.strerror}; choose another --out") from error


def find_crossings(levels: Sequence[LevelFigures], slo: Sequence[SloLimit]) -> list[Crossing]:
    """Where each endpoint crosses each limit. A closed loop has no rate to cross at."""
    if not is_open(levels):
        return []
    by_endpoint = [[level for level in levels if level.endpoint == name] for name in endpoints_of(levels)]
    return [capacity(own, limit) for limit in slo for own in by_endpoint]


def crossing_places(crossings: Sequence[Crossing]) -> Crossings:
    """The crossings that charts mark: those that were seen."""
    places: Crossings = {}
    for crossing in crossings:
        if crossing.kind == "at" and crossing.qps is not None:
            places.setdefault(crossing.limit, {})[crossing.endpoint] = crossing.qps
    return places


def text_report(benchmark: Benchmark, comparison: Comparison, crossings: Sequence[Crossing], vllm_names: bool) -> str:
    """The result as text: one level in full, or curves; then comparisons, crossings and notes."""
    levels = comparison.figures
    parts = [curve_text(levels)] if len(levels) > 1 else []
    parts += [level_text(level) for level in levels[:1] if len(levels) == 1]
    parts += [pair_text(pair) for pair in comparison.pairs]
    if not comparison.pairs and len(levels) > 1:
        parts.append(
            "\n".join(f"{crossing.endpoint} keeps {crossing.limit.text}: {crossing.text}" for crossing in crossings)
        )
    if vllm_names:
        parts += [vllm_text(level) for level in levels]
    parts.append("\n".join(benchmark.notes))
    return "\n\n".join(part for part in parts if part)
