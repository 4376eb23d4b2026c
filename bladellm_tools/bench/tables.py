"""Results as aligned plain text, for a terminal and for pipes. Times are milliseconds; an empty cell is "too few"."""

from collections.abc import Sequence

from bladellm_tools.bench.columns import TIMES
from bladellm_tools.bench.compare import Pair, Ratio, figure_title, times
from bladellm_tools.bench.figures import Figure, LevelFigures
from bladellm_tools.bench.metrics import STATISTICS

CURVE = ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "tpot_mean", "e2e_p50", "e2e_p99")
NOISY = "~"
"""Stands after a figure whose runs vary by more than 10 %."""


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table: the first `left` columns to the left, the others to the right, two spaces apart."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [
            f"{cell:<{width}}" if place < left else f"{cell:>{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None) -> str:
    """Three significant digits without an exponent; empty for None."""
    if value is None:
        return ""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 or not value else f"{value:.5f}"


def milliseconds(figure: Figure) -> str:
    """A time, with a mark where the runs vary much."""
    if figure.value is None:
        return ""
    return number(figure.value * 1e3) + (NOISY if figure.noisy else "")


def share(value: float | None) -> str:
    """A share in per cent; empty for None."""
    return "" if value is None else f"{value * 100:.3g}%"


def curve_table(figures: Sequence[LevelFigures]) -> str:
    """One row a level: the curves in numbers. Several endpoints stand one below the other."""
    header = ["endpoint", "level", "done", "failed", "req/s", "out tok/s", "total tok/s"]
    header += [f"{figure_title(name)} ms" for name in CURVE] + [
        "goodput/s",
        "in SLO",
        "in flight",
        "tok/chunk",
        "marks",
    ]
    rows = []
    for level in figures:
        row = [level.endpoint, level.load.label, str(level.completed), str(level.failed)]
        row += [number(level.value(f"{name}_per_s")) for name in ("requests", "output_tokens", "total_tokens")]
        row += [milliseconds(level.values[name]) for name in CURVE]
        row += [number(level.value("goodput")), share(level.value("goodput_share"))]
        row += [number(level.value("in_flight_mean")), number(level.value("tokens_per_chunk")), level.marks]
        rows.append(row)
    return aligned(header, rows, left=2)


def level_table(level: LevelFigures) -> str:
    """Every metric of one level: mean with its interval, deviation and percentiles."""
    header = ["ms", "mean", "95 % interval", *STATISTICS[1:]]
    rows = []
    for metric in TIMES:
        mean = level.values[f"{metric}_mean"]
        span = f"{number(mean.interval.low * 1e3)}–{number(mean.interval.high * 1e3)}" if mean.interval else ""
        rest = [milliseconds(level.values[f"{metric}_{statistic}"]) for statistic in STATISTICS[1:]]
        rows.append([metric, milliseconds(mean), span, *rest])
    return aligned(header, rows)


def rate_lines(level: LevelFigures) -> str:
    """What a level carried, and what the client did meanwhile."""
    value = level.value
    asked = f"{number(value('intended_qps'))} asked, " if value("intended_qps") is not None else ""
    rows = [
        ("requests/s", f"{number(value('requests_per_s'))} ({asked}{number(value('achieved_qps'))} sent)"),
        ("success", f"{share(value('success_share'))} of {level.requests}{_failures(level)}"),
        ("tokens/s", _token_rates(level, "")),
        ("tokens/s overall", _token_rates(level, "overall_")),
        ("in flight", f"mean {number(value('in_flight_mean'))}, peak {number(value('in_flight_peak'))}"),
        ("tokens per chunk", number(value("tokens_per_chunk"))),
        ("cached prompt tokens", share(value("cached_share"))),
        ("shorter than asked", share(value("short_share"))),
        ("schedule lag ms", f"p50 {_ms(value('schedule_lag_p50'))}, p99 {_ms(value('schedule_lag_p99'))}"),
        (
            "client",
            f"{share(value('client_cpu_share'))} of a core, loop lag p99 {_ms(value('loop_lag_p99'))} ms, "
            f"headroom {number(value('client_headroom'))}×",
        ),
    ]
    if value("goodput_share") is not None:
        rows.insert(
            2, ("goodput", f"{number(value('goodput'))} requests/s, {share(value('goodput_share'))} within the SLO")
        )
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _token_rates(level: LevelFigures, prefix: str) -> str:
    """Input, output and total, always all three: quoting one for another is the oldest confusion."""
    return ", ".join(
        f"{kind} {number(level.value(f'{prefix}{kind}_tokens_per_s'))}" for kind in ("input", "output", "total")
    )


def _failures(level: LevelFigures) -> str:
    kinds = [f"{count} {kind}" for kind, count in level.outcomes.items() if kind != "ok"]
    codes = [f"{count} HTTP {code}" for code, count in level.http.items() if not code.startswith("2")]
    return f" ({', '.join(kinds + codes)})" if kinds or codes else ""


def _ms(seconds: float | None) -> str:
    return number(None if seconds is None else seconds * 1e3)


def error_table(figures: Sequence[LevelFigures]) -> str:
    """Failed requests by kind and HTTP code, the levels that had some; empty if none had."""
    rows = [
        [level.endpoint, level.load.label, str(level.failed), _failures(level).strip(" ()")]
        for level in figures
        if level.failed
    ]
    return aligned(["endpoint", "level", "failed", "how"], rows, left=2) if rows else ""


def note_lines(figures: Sequence[LevelFigures]) -> str:
    """The notes of all levels, each once with the levels it is true of."""
    places: dict[str, list[str]] = {}
    for level in figures:
        for note in level.notes:
            places.setdefault(note, []).append(f"{level.endpoint} {level.load.label}")
    lines = [
        f"{'all levels' if len(found) == len(figures) > 1 else ', '.join(found)}: {note}"
        for note, found in places.items()
    ]
    if any(figure.noisy for level in figures for figure in level.values.values()):
        lines.append(f"{NOISY} the runs of a level vary by more than 10 %")
    return "\n".join(lines)


def ratio_text(ratio: Ratio | None) -> str:
    """`1.98× (1.93–2.03)`, `at least 2×`, or nothing."""
    if ratio is None:
        return ""
    span = f" ({ratio.interval.low:.3g}–{ratio.interval.high:.3g})" if ratio.interval else ""
    return f"{ratio.bound} {times(ratio.value)}{span}".strip()


def rate_table(pair: Pair) -> str:
    """What as many streams get done: both rates, and first over second."""
    header = ["level", "figure", pair.first, pair.second, "ratio (95 %)", "marks"]
    rows = [
        [
            row.load.label,
            figure_title(row.figure),
            number(row.first),
            number(row.second),
            ratio_text(row.ratio),
            row.mark,
        ]
        for row in pair.rates
    ]
    return aligned(header, rows, left=2)


def vertical_table(pair: Pair) -> str:
    """Latency at equal load: both values, first over second, and how many times lower the first one's is."""
    header = ["level", "figure", f"{pair.first} ms", f"{pair.second} ms", "ratio (95 %)", "times lower (95 %)", "marks"]
    rows = [
        [
            row.load.label,
            figure_title(row.figure),
            _ms(row.first),
            _ms(row.second),
            ratio_text(row.ratio),
            ratio_text(row.ratio.inverse if row.ratio else None),
            row.mark,
        ]
        for row in pair.vertical
    ]
    return aligned(header, rows, left=2)


def horizontal_table(pair: Pair) -> str:
    """Load at equal latency: the QPS up to which each keeps a limit, and first over second."""
    header = ["limit", pair.first, pair.second, "ratio (95 %)", "marks"]
    rows = [
        [
            row.limit.text,
            row.first.text,
            row.second.text,
            ratio_text(row.ratio),
            ", ".join(f"{side.endpoint}: {side.note}" for side in (row.first, row.second) if side.note),
        ]
        for row in pair.horizontal
    ]
    return aligned(header, rows)


def pair_text(pair: Pair) -> str:
    """The tables that have rows, and the sentences."""
    parts = [rate_table(pair)] if pair.rates else []
    parts += [vertical_table(pair), *([horizontal_table(pair)] if pair.horizontal else []), "\n".join(pair.summary)]
    return "\n\n".join(parts)


def level_text(level: LevelFigures) -> str:
    """Everything about one level: for a single run."""
    return "\n\n".join([f"{level.endpoint}, {level.load.label}", rate_lines(level), level_table(level)])


def curve_text(figures: Sequence[LevelFigures]) -> str:
    """Everything about a sweep: the curve, the failures and the notes."""
    parts = [curve_table(figures), error_table(figures), note_lines(figures)]
    return "\n\n".join(part for part in parts if part)
