"""The text tables say what the figures say, in columns."""

import pytest

from bladellm_tools.bench.compare import compare
from bladellm_tools.bench.compat import vllm_figures, vllm_text
from bladellm_tools.bench.figures import combine, level_figures
from bladellm_tools.bench.metrics import summarise
from bladellm_tools.bench.records import Outcome
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.tables import aligned, curve_table, curve_text, level_text, number, pair_text
from tests.bench.synthetic import answered, benchmark_of, failed, queue_run, run_of


def columns_of(table: str) -> list[list[str]]:
    """The cells of a table, by where its header's columns begin and end."""
    header, *rows = table.splitlines()
    assert all(len(row) <= max(map(len, table.splitlines())) for row in rows)
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in (header, *rows)]


def test_columns_line_up() -> None:
    text = aligned(["name", "value"], [["a", "1"], ["longer", "1,234"]])
    assert text.splitlines() == ["name    value", "a           1", "longer  1,234"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0"),
        (0.00042, "0.00042"),
        (0.12345, "0.123"),
        (99.94, "99.9"),
        (123456.7, "123,457"),
        (100, "100"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert number(value) == text


def test_a_curve_has_a_row_a_level() -> None:
    runs = [run_of([answered(0.01 * i, ttft=0.25) for i in range(250)]), queue_run(2.0, 0.05, count=30)]
    header, *rows = columns_of(curve_table(level_figures(benchmark_of(runs))))
    assert len(rows) == 2
    assert rows[0][header.index("TTFT p99 ms")] == "250"
    assert len(rows[1]) < len(rows[0]), "p99 of 30 completions must be empty"


def test_failures_and_notes_are_told() -> None:
    records = [answered(float(i)) for i in range(20)] + [failed(0.5), failed(1.5, Outcome.TIMEOUT, None)]
    run = run_of(records)
    run.aborted = "the server was gone"
    text = curve_text(level_figures(benchmark_of([run, queue_run(2.0, 0.05, count=20)])))
    assert "1 http_error, 1 timeout, 1 HTTP 503" in text
    assert "ended early: the server was gone" in text


def test_one_level_tells_everything() -> None:
    text = level_text(combine([summarise(queue_run(2.0, 0.05), parse_slo(["ttft_p99=1s"]))]))
    for words in ("requests/s", "goodput", "tokens/s overall", "input", "output", "total", "schedule lag", "headroom",
                  "tbt", "chunk_gap", "max_stall", "95 % interval", "tokens per chunk"):  # fmt: skip
        assert words in text


def test_a_pair_shows_ratios_with_intervals() -> None:
    runs = [
        queue_run(qps, 0.1, endpoint=name, slower=slower)
        for name, slower in (("fast", 1.0), ("slow", 2.0))
        for qps in (1.0, 4.0, 7.0)
    ]
    (pair,) = compare(benchmark_of(runs), parse_slo(["ttft_p50=250ms"])).pairs
    text = pair_text(pair)
    assert "0.5× (" in text
    assert "2× (" in text
    assert "at least" in text
    assert text.endswith(pair.summary[-1])


def test_vllm_names_have_vllm_definitions() -> None:
    """From the actual send, gaps between chunks: not from the schedule and not per token."""
    records = [answered(0.01 * i, lag=0.5, ttft=0.25, gaps=[0.04] * 5, tokens=[2] * 6) for i in range(250)]
    level = combine([summarise(run_of(records))])
    found = vllm_figures(level)
    assert found["p99_ttft_ms"] == pytest.approx(250)
    assert found["mean_itl_ms"] == pytest.approx(40)
    assert found["mean_tpot_ms"] == pytest.approx(200 / 11)
    assert found["median_e2el_ms"] == pytest.approx(450)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (250, 0, 3000)
    assert level.value("ttft_p50") == pytest.approx(0.75)
    assert "p99_ttft_ms" in vllm_text(level)
