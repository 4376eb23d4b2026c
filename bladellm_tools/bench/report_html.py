"""The report as one self-contained HTML file: charts, figures with intervals, warnings, environment, definitions."""

from collections.abc import Sequence
from html import escape

from bladellm_tools.bench.capacity import Crossing
from bladellm_tools.bench.columns import TIMES
from bladellm_tools.bench.compare import Comparison, Pair, figure_title
from bladellm_tools.bench.figures import Figure, LevelFigures
from bladellm_tools.bench.metrics import STATISTICS
from bladellm_tools.bench.plot_style import Chart
from bladellm_tools.bench.records import Benchmark
from bladellm_tools.bench.report_page import bullets, facts, figures, page, table
from bladellm_tools.bench.tables import error_table, number, ratio_text, share

COLUMNS = {
    "sent/s": ("achieved_qps", 1.0),
    "TTFT p50 ms": ("ttft_p50", 1e3),
    "TTFT p99 ms": ("ttft_p99", 1e3),
    "TBT p50 ms": ("tbt_p50", 1e3),
    "TBT p99 ms": ("tbt_p99", 1e3),
    "E2E p50 ms": ("e2e_p50", 1e3),
    "output tok/s": ("output_tokens_per_s", 1.0),
    "total tok/s": ("total_tokens_per_s", 1.0),
    "goodput/s": ("goodput", 1.0),
    "in flight": ("in_flight_mean", 1.0),
}
CLIENT_COLUMNS = {
    "lag p50 ms": ("schedule_lag_p50", 1e3),
    "lag p99 ms": ("schedule_lag_p99", 1e3),
    "loop lag p99 ms": ("loop_lag_p99", 1e3),
    "µs a chunk": ("chunk_cost", 1e6),
    "headroom ×": ("client_headroom", 1.0),
    "tokens a chunk": ("tokens_per_chunk", 1.0),
}
DEFINITIONS = {
    "TTFT": "From the intended send to the first chunk with text, reasoning or a tool call; a late client adds to it.",
    "TBT": "Time between chunks divided by the tokens of the later one, counted once a token.",
    "TPOT": "(last token − first token) / (tokens − 1), once a request.",
    "E2E": "From the intended send to the end of the answer.",
    "Goodput": "Requests a second that keep every limit of the SLO by themselves; a failed request keeps none.",
    "Steady window": "From where token throughput settles to the last intended send. Requests due in it count.",
    "Interval": "95 %: by t over the repeats; of a single run, or where only all repeats together have enough "
    "requests, by a bootstrap over blocks of requests.",
    "CV": "Standard deviation over mean of the repeats; shown where it is above 10 %.",
    "Percentiles": "p99 needs 200 completed requests and p99.9 needs 1,000; with fewer the cell is empty.",
    "Over-saturated": "Requests in flight keep growing over the window: there is no steady state to measure.",
    "Client-limited": "More than 1 % of the requests left late, or the client used up its processor: the figures are "
    "the client's, not the server's. Such runs are never averaged in.",
    "Crossing": "The load at which a curve reaches a limit, interpolated between levels; above or below where no level "
    "shows it.",
}


def make_html(
    benchmark: Benchmark, comparison: Comparison, crossings: Sequence[Crossing], curves: list[Chart], runs: list[Chart]
) -> str:
    """The whole report."""
    levels = comparison.figures
    return page(
        benchmark.title,
        [
            f"<h1>{escape(benchmark.title)}</h1>",
            f'<p class="quiet">{escape(subtitle(benchmark))}</p>',
            warnings(benchmark, levels),
            bullets([line for pair in comparison.pairs for line in pair.summary], "headlines"),
            figures(curves[:2], "main"),
            crossing_table(crossings),
            *(pair_section(pair) for pair in comparison.pairs),
            "<h2>Levels</h2>",
            level_table(levels, COLUMNS),
            figures(curves[2:], "main"),
            errors_section(levels),
            "<h2>Inside the levels</h2>",
            figures(runs),
            "<h2>The client</h2>",
            level_table(levels, CLIENT_COLUMNS),
            details("All latencies", all_latencies(levels)),
            "<h2>Environment</h2>",
            facts(benchmark.environment),
            details("Flags", facts({name: flag_text(value) for name, value in benchmark.flags.items()})),
            f"<h2>Definitions</h2><dl>{definitions()}</dl>",
        ],
    )


def subtitle(benchmark: Benchmark) -> str:
    """When, and how much was measured."""
    requests = sum(len(run.requests) for run in benchmark.runs)
    facts = (f"blade_llm_bench {benchmark.environment.get('BladeLLM Open', '')}", benchmark.environment.get("date", ""))
    seeds = ", ".join(dict.fromkeys(str(run.seed) for run in benchmark.runs))
    return f"{', '.join(fact.strip() for fact in facts if fact)}: {requests:,} requests in " + (
        f"{len(benchmark.runs)} runs of {len(benchmark.loads)} levels; seed {seeds}"
    )


def warnings(benchmark: Benchmark, levels: Sequence[LevelFigures]) -> str:
    """What a reader must know before the figures: interruptions, and the notes of the levels, equal ones together."""
    found: dict[str, list[str]] = {}
    for level in levels:
        for note in level.notes:
            found.setdefault(f"{level.endpoint}: {note}", []).append(level.load.label)
    lines = [*benchmark.notes, *(f"{note} ({', '.join(where)})" for note, where in found.items())]
    return f'<div class="warnings"><strong>Please note</strong>{bullets(lines)}</div>' if lines else ""


def value_cell(figure: Figure, scale: float) -> str:
    """A value over its interval; the runs' variation where it is large."""
    if figure.value is None:
        return ""
    small = ""
    if figure.interval is not None:
        low, high = max(figure.interval.low, 0.0) * scale, figure.interval.high * scale
        small = f"<small>{number(low)}–{number(high)}</small>"
    if figure.noisy:
        small += f"<small>CV {share(figure.cv)}</small>"
    return f"{number(figure.value * scale)}{small}"


def marks(level: LevelFigures) -> str:
    """What disqualifies a level, a line each."""
    return "".join(f"<small><b>{escape(mark)}</b></small>" for mark in level.marks.split(", ") if mark)


def level_table(levels: Sequence[LevelFigures], columns: dict[str, tuple[str, float]]) -> str:
    """One row a level of every endpoint."""
    rows = [
        [
            f"{escape(level.endpoint)}<small>{escape(level.load.label)}</small>{marks(level)}",
            f"{level.completed:,}<small>{level.failed:,} failed</small>",
            *(value_cell(level.values[name], scale) for name, scale in columns.values()),
        ]
        for level in levels
    ]
    return table(["level", "completed", *columns], rows)


def crossing_table(crossings: Sequence[Crossing]) -> str:
    """Where the curves cross the limits."""
    rows = [
        [
            escape(crossing.endpoint),
            escape(crossing.limit.text),
            escape(crossing.text),
            f"{number(crossing.interval.low)}–{number(crossing.interval.high)}" if crossing.interval else "",
            escape(crossing.note),
        ]
        for crossing in crossings
    ]
    return f"<h2>Load within the SLO</h2>{table(['endpoint', 'limit', 'up to', '95 %', ''], rows)}" if rows else ""


def pair_section(pair: Pair) -> str:
    """The ratios of two endpoints, in both forms."""
    first, second = escape(pair.first), escape(pair.second)
    vertical = [
        [
            escape(row.load.label), figure_title(row.figure), milliseconds(row.first), milliseconds(row.second),
            escape(ratio_text(row.ratio)), escape(ratio_text(row.ratio.inverse if row.ratio else None)),
            f"<small>{escape(row.mark)}</small>",
        ]
        for row in pair.vertical
    ]  # fmt: skip
    horizontal = [
        [escape(row.limit.text), escape(row.first.text), escape(row.second.text), escape(ratio_text(row.ratio))]
        for row in pair.horizontal
    ]
    return (
        f"<h2>{first} against {second}</h2>{rate_section(pair)}<h3>Latency at equal load</h3>"
        + table(["load", "figure", f"{first} ms", f"{second} ms", "ratio (95 %)", "times lower (95 %)", ""], vertical)
        + "<h3>Load at equal latency</h3>"
        + table(["limit", first, second, "ratio (95 %)"], horizontal)
    )


def rate_section(pair: Pair) -> str:
    """What as many streams get done, of both endpoints; empty without closed loops."""
    rows = [
        [
            escape(row.load.label), figure_title(row.figure), number(row.first), number(row.second),
            escape(ratio_text(row.ratio)), f"<small>{escape(row.mark)}</small>",
        ]
        for row in pair.rates
    ]  # fmt: skip
    header = ["load", "figure", escape(pair.first), escape(pair.second), "ratio (95 %)", ""]
    return f"<h3>What as many streams get done</h3>{table(header, rows)}" if rows else ""


def milliseconds(seconds: float | None) -> str:
    """A time, or an empty cell."""
    return "" if seconds is None else number(seconds * 1e3)


def errors_section(levels: Sequence[LevelFigures]) -> str:
    """How requests failed, where any did, with the first message of each level."""
    text = error_table(levels)
    if not text:
        return ""
    messages = [
        f"{level.endpoint}, {level.load.label}: {error}"
        for level in levels
        if (error := first_error(level)) is not None
    ]
    return f"<h2>Failures</h2><pre>{escape(text)}</pre>{bullets(messages)}"


def first_error(level: LevelFigures) -> str | None:
    """The first error message of a level."""
    return next((record.error for run in level.runs for record in run.run.requests if record.error), None)


def all_latencies(levels: Sequence[LevelFigures]) -> str:
    """Every latency metric of every level, in milliseconds."""
    rows = [
        [f"{escape(level.endpoint)}<small>{escape(level.load.label)}</small>", metric]
        + [value_cell(level.values[f"{metric}_{statistic}"], 1e3) for statistic in STATISTICS]
        for level in levels
        for metric in TIMES
    ]
    return table(["level", "metric, ms", *STATISTICS], rows)


def details(title: str, content: str) -> str:
    """A part that opens on demand."""
    return f"<details><summary>{title}</summary>{content}</details>"


def flag_text(value: object) -> str:
    """A flag's value as it would be given."""
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return "" if value is None else str(value)


def definitions() -> str:
    """What the words mean."""
    return "".join(f"<dt>{escape(word)}</dt><dd>{escape(meaning)}</dd>" for word, meaning in DEFINITIONS.items())
