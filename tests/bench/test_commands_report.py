"""The report: it loads nothing, holds what was measured, and comes out the same from stored results."""

import io
import re
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from bladellm_tools.bench import charts, plot_style
from bladellm_tools.bench.charts import curve_charts
from bladellm_tools.bench.client import LiveEvent
from bladellm_tools.bench.figures import level_figures
from bladellm_tools.bench.live import Counts, PlainView, level_line
from bladellm_tools.bench.live_screen import picture
from bladellm_tools.bench.metrics import summarise
from bladellm_tools.bench.plot_curves import CurveChart, draw_curves
from bladellm_tools.bench.plot_style import DARK, LIGHT, PNG_DPI, SIZE, Chart
from bladellm_tools.bench.records import Benchmark, Load
from bladellm_tools.bench.reporting import make_report
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.storage import save
from tests.bench.commanding import bench
from tests.bench.simulated import simulated_benchmark, simulated_run
from tests.bench.synthetic import answered, run_of

SLO = parse_slo(["ttft_p99=500ms", "tbt_p99=50ms"])
PNG = b"\x89PNG\r\n\x1a\n"
COARSE_DPI = 40


@pytest.fixture(scope="module", autouse=True)
def coarse_pictures() -> Iterator[None]:
    """Pictures of few dots, which are drawn sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plot_style, "PNG_DPI", COARSE_DPI)
        yield


@pytest.fixture
def first_curve_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the curves, TTFT over load is drawn; the others stay empty."""

    def draw(chart: CurveChart) -> Chart:
        drawn = chart.name == "ttft_over_load"
        return draw_curves(chart) if drawn else Chart(chart.name, chart.title, chart.caption, "", b"")

    monkeypatch.setattr(charts, "draw_curves", draw)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Benchmark, str]:
    """Folder, benchmark and printed text of a report of two servers."""
    folder = tmp_path_factory.mktemp("report")
    benchmark = simulated_benchmark((5, 10, 18, 26))
    benchmark.notes.append("A <note> & more.")
    return folder, benchmark, make_report(benchmark, SLO, folder, store=True, vllm_names=True)


class Links(HTMLParser):
    """Collects what a page would load, and whether its tags are balanced."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href", "srcset")]
        self.loads += re.findall(r"url\(([^)]*)\)", " ".join(value or "" for value in found.values()))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_loads_nothing_and_is_well_formed(report) -> None:
    html = (report[0] / "report.html").read_text()
    links = Links()
    links.feed(html)
    assert links.open == []
    assert links.loads
    assert all(target.startswith("#") for target in links.loads)
    assert {target.removeprefix("#") for target in links.loads} <= set(links.ids)
    assert not re.search(r"https?://|@import|<script|<iframe|<link", html)
    assert "default-src 'none'" in html


def test_the_page_holds_both_themes_and_no_fixed_colour_in_charts(report) -> None:
    html = (report[0] / "report.html").read_text()
    assert DARK.paper in html
    assert "@media print" in html
    svgs = "".join(re.findall(r"<svg.*?</svg>", html, re.S))
    assert not re.findall(r"#[0-9a-f]{6}\b", svgs), "every colour of a chart is a variable of the page"
    colours = [*LIGHT.variables.values()]
    assert len(set(colours)) == len(colours) == len(DARK.variables)


def test_the_page_says_everything(report) -> None:
    folder, benchmark, _ = report
    html = (folder / "report.html").read_text()
    assert "A &lt;note&gt; &amp; more." in html
    for level in level_figures(benchmark, SLO):
        assert level.load.label in html
    for text in ("ours", "peer", "TTFT over load", "TBT over load", "Goodput over load", "Environment", "Definitions"):
        assert text in html
    assert "over-saturated" in html
    assert "95 %" in html


def test_every_chart_is_a_picture_too(report) -> None:
    pictures = sorted((report[0] / "charts").glob("*.png"))
    assert {"ttft_over_load.png", "tbt_over_load.png", "goodput_over_load.png"} <= {path.name for path in pictures}
    assert len(pictures) == 4 + 2 * 4
    for path in pictures:
        data = path.read_bytes()
        assert data.startswith(PNG)
        assert int.from_bytes(data[16:20]) == int(SIZE[0] * COARSE_DPI)


def test_pictures_are_fine_enough_to_print(monkeypatch) -> None:
    monkeypatch.setattr(plot_style, "PNG_DPI", PNG_DPI)
    chart = draw_curves(CurveChart("one", "One", "", "x", "y", []))
    assert int.from_bytes(chart.png[16:20]) > 700


def test_p50_is_solid_p99_dashed_and_the_crossing_marked(report, first_curve_only) -> None:
    levels = level_figures(report[1], SLO)
    plain, marked = (curve_charts(levels, SLO, crossings)[0].svg for crossings in ({}, {SLO[0]: {"ours": 17.25}}))
    assert "stroke-dasharray" in plain
    assert {"ours p50", "ours p99", "peer p50", "peer p99", "p99 ≤ 500 ms"} <= set(
        re.findall(r">([^<>]+)</text>", plain)
    )
    assert ">17.2<" in marked or ">17.3<" in marked
    assert ">17.2<" not in plain


def test_printed_text_names_the_result_and_vllms_names(report) -> None:
    text = report[2]
    assert "report.html" in text
    assert "ours carries" in text
    assert "median_ttft_ms" in text
    assert "A <note> & more." in text


def test_plot_makes_the_same_report_from_stored_results(report, tmp_path) -> None:
    folder, _, text = report
    again = bench("plot", "--results", str(folder), "--compat", "vllm", folder=tmp_path / "again")
    assert again.code == 0, again.err
    assert again.html == (folder / "report.html").read_text()
    for drawn in (folder / "charts").iterdir():
        assert (tmp_path / "again" / "charts" / drawn.name).read_bytes() == drawn.read_bytes()
    assert again.out.splitlines()[:-1] == text.splitlines()[:-1]


def test_plot_merges_folders(tmp_path, few_charts) -> None:
    for name in ("mon", "tue"):
        save(Benchmark(name, {}, {}, [simulated_run("ours", 5)]), tmp_path / name)
    done = bench("plot", "--results", str(tmp_path / "mon"), str(tmp_path / "tue"), "--title", "Both",
                 folder=tmp_path / "both")  # fmt: skip
    assert done.code == 0, done.err
    assert "<h1>Both</h1>" in done.html
    assert "ours@mon" in done.out
    assert "ours@tue" in done.out
    assert "blade_llm_bench: " in done.html
    again = bench("plot", "--results", str(tmp_path / "mon"), folder=tmp_path / "tue")
    assert again.code == 1
    assert "holds other results" in again.err


def test_plot_refuses_what_is_not_there(tmp_path) -> None:
    done = bench("plot", "--results", str(tmp_path / "none"), folder=tmp_path / "out")
    assert done.code == 1
    assert "benchmark.json" in done.err


@pytest.mark.turns
@pytest.mark.parametrize(
    "runs",
    [
        [simulated_run("a", 5, failing=1.0)],
        [simulated_run("a", 0.2, seconds=4)],
        [simulated_run("a", rate, seconds=4) for rate in range(1, 14)],
    ],
    ids=["all failed", "hardly any", "13 levels"],
)
def test_odd_benchmarks_still_make_a_report(runs: list, tmp_path) -> None:
    text = make_report(Benchmark("Odd & <b>", {}, {}, runs), SLO, tmp_path, store=True, vllm_names=True)
    assert "report.html" in text
    assert "Odd &amp; &lt;b&gt;" in (tmp_path / "report.html").read_text()


def test_answers_without_a_token_make_a_report_without_a_warning(tmp_path) -> None:
    """A warning of the charts' library would be lines on standard error beside the result."""
    records = [answered(0.1 * number, ttft=0.0, gaps=[], tokens=[]) for number in range(9)]
    for record in records:
        record.times = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_report(Benchmark("empty", {}, {}, [run_of(records)]), SLO, tmp_path, store=True, vllm_names=False)


def test_more_servers_than_colours_are_drawn(first_curve_only) -> None:
    runs = [simulated_run(f"server{number}", 5, seconds=4) for number in range(len(LIGHT.series) + 1)]
    (chart, *_) = curve_charts(level_figures(Benchmark("Many", {}, {}, runs)), [], {})
    assert all(f"server{number} p50" in chart.svg for number in range(len(runs)))


def test_closed_loops_are_plotted_over_what_they_achieved(tmp_path, few_charts) -> None:
    runs = [simulated_run("a", rate) for rate in (4, 8)]
    for streams, run in enumerate(runs, 1):
        run.load = Load(concurrency=streams)
    make_report(Benchmark("Closed", {}, {}, runs), SLO, tmp_path, store=True, vllm_names=False)
    html = (tmp_path / "report.html").read_text()
    assert "requests a second (achieved)" in html
    assert "1 streams" in html


def test_the_plain_view_is_one_line_a_level(capsys) -> None:
    summary = summarise(simulated_run("ours", 10), SLO)
    view = PlainView()
    view.level_begins("ours", Load(qps=10), "run 1/2", 200)
    view.level_ends(summary, "run 1/2")
    view.close()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == level_line(summary, "run 1/2") + "\n"
    assert re.search(r"ours +10 QPS  run 1/2  TTFT p50 +[\d.]+ ms", shown.err)


def test_live_counts_follow_the_events() -> None:
    counts = Counts("ours", "5 QPS", "run 1/1", 100)
    run = simulated_run("ours", 5, failing=0.2)
    for record in run.requests:
        for kind in ("sent", *(["first_token"] if record.times else []), "ended"):
            counts.count(LiveEvent(kind, 0.0, record))
    shown = counts.snapshot()
    failed = sum(record.outcome != "ok" for record in run.requests)
    assert (shown["sent"], shown["ended"], shown["failed"]) == (len(run.requests), len(run.requests), failed)
    assert 0 < shown["ttft"][0] <= shown["ttft"][1]
    assert shown["tbt"][0] == pytest.approx(0.011, rel=0.1)


def test_the_picture_shows_progress_latency_failures_and_the_client() -> None:
    counts = Counts("ours", "5 QPS", "run 1/3", 100)
    for record in simulated_run("ours", 5, failing=0.2).requests:
        counts.count(LiveEvent("sent", 0.0, record))
    console = Console(file=io.StringIO(), width=90)
    console.print(picture(counts.snapshot() | {"client": 0.25, "failed": 3, "ttft": [0.04, 0.09]}))
    shown = console.file.getvalue()
    for text in (
        "ours",
        "5 QPS",
        "run 1/3",
        f"{counts.sent} in flight",
        "3 failed",
        "p50 40.0 ms",
        "p99 90.0 ms",
        "4×",
    ):
        assert text in shown
    assert max(map(len, shown.splitlines())) <= 90
