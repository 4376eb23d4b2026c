"""What is saved is what is loaded, and nothing else is read."""

import csv
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bladellm_tools.bench import storage
from bladellm_tools.bench.figures import level_figures
from bladellm_tools.bench.metrics import FIGURES
from bladellm_tools.bench.records import Benchmark, ClientHealth, LevelRun, Load, Outcome, RequestRecord
from bladellm_tools.bench.slo import parse_slo
from bladellm_tools.bench.storage import StorageError, load, save
from tests.bench.synthetic import answered, benchmark_of, failed, queue_run, run_of

SECONDS = st.floats(0, 1e9, allow_nan=False)
COUNTS = st.integers(0, 2**53)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def requests(draw: st.DrawFn) -> RequestRecord:
    chunks = draw(st.lists(st.tuples(SECONDS, st.integers(0, 9)), max_size=5))
    optional = st.none() | SECONDS
    return RequestRecord(
        index=draw(COUNTS), intended=draw(SECONDS), sent=draw(optional), headers=draw(optional),
        first_chunk=draw(optional), times=sorted(time for time, _ in chunks), tokens=[count for _, count in chunks],
        ended=draw(optional), outcome=draw(st.sampled_from(Outcome)), status=draw(st.none() | st.integers(100, 599)),
        error=draw(st.none() | TEXT), finish_reason=draw(st.none() | TEXT), asked_tokens=draw(COUNTS),
        prompt_tokens=draw(COUNTS), completion_tokens=draw(COUNTS), cached_tokens=draw(COUNTS), counted_by=draw(TEXT),
    )  # fmt: skip


LOADS = st.builds(Load, qps=st.floats(1e-3, 1e6)) | st.builds(Load, concurrency=st.integers(1, 10**6))
CLIENTS = st.builds(ClientHealth, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, SECONDS, st.booleans())
RUNS = st.builds(
    LevelRun, endpoint=TEXT, load=LOADS, repeat=st.integers(0, 99), seed=st.integers(0, 2**63 - 1), began=SECONDS,
    duration=st.floats(0, 100), warmup=st.floats(0, 100), requests=st.lists(requests(), max_size=4), client=CLIENTS,
    aborted=st.none() | TEXT,
)  # fmt: skip
BENCHMARKS = st.builds(
    Benchmark, title=TEXT, flags=st.dictionaries(TEXT, JSON, max_size=4),
    environment=st.dictionaries(TEXT, TEXT, max_size=4), runs=st.lists(RUNS, max_size=3),
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(BENCHMARKS)
def test_a_benchmark_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, benchmark: Benchmark) -> None:
    folder = tmp_path_factory.mktemp("results")
    save(benchmark, folder)
    assert load(folder) == benchmark


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small benchmark on disk."""
    runs = [queue_run(qps, 0.05, count=30, endpoint=name) for name in ("a", "b") for qps in (1.0, 2.0)]
    save(benchmark_of(runs), tmp_path / "results")
    return tmp_path / "results"


def test_the_folder_holds_what_its_page_says(folder: Path) -> None:
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert names == ["benchmark.json", "levels.csv", *(f"runs/00{number}.jsonl" for number in range(4))]
    lines = (folder / "runs/000.jsonl").read_text().splitlines()
    assert len(lines) == 31
    assert json.loads(lines[0])["schema"] == json.loads((folder / "benchmark.json").read_text())["schema"] == 1
    assert [json.loads(line)["index"] for line in lines[1:]] == list(range(30))


def test_the_csv_has_a_row_a_level_and_empty_cells_where_there_is_too_little(folder: Path) -> None:
    with (folder / "levels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["endpoint"], row["qps"]) for row in rows] == [("a", "1.0"), ("a", "2.0"), ("b", "1.0"), ("b", "2.0")]
    figures = level_figures(load(folder))
    for row, level in zip(rows, figures, strict=True):
        assert float(row["ttft_p50"]) == level.value("ttft_p50")
        assert row["ttft_p99"] == ""
        assert {f"{name}_low" for name in FIGURES} < row.keys()


def test_the_summary_has_the_figures_it_was_given(tmp_path: Path) -> None:
    benchmark = benchmark_of([queue_run(1.0, 0.05, count=30), run_of([failed(0.0)], load=Load(qps=4.0))])
    save(benchmark, tmp_path, level_figures(benchmark, parse_slo(["ttft_p99=1s"])))
    ok, bad = json.loads((tmp_path / "benchmark.json").read_text())["levels"]
    assert ok["figures"]["goodput_share"]["value"] == 1.0
    assert bad["outcomes"] == {"http_error": 1}
    assert bad["http"] == {"503": 1}


def test_saving_again_replaces(folder: Path) -> None:
    save(benchmark_of([queue_run(9.0, 0.01, count=5)]), folder)
    assert [run.load.qps for run in load(folder).runs] == [9.0]


def test_an_interrupted_save_leaves_the_old_results(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(folder)
    real = storage._encode
    left = [20]

    def fails_midway(value: object) -> bytes:
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        return real(value)

    monkeypatch.setattr(storage, "_encode", fails_midway)
    with pytest.raises(StorageError, match=r"000\.jsonl cannot be written: No space left"):
        save(benchmark_of([queue_run(9.0, 0.01, count=50)]), folder)
    monkeypatch.undo()
    assert load(folder) == before
    assert not list(folder.rglob("*.part"))


def test_text_that_is_no_unicode_is_saved_all_the_same(tmp_path: Path) -> None:
    record = failed(0.0)
    record.error = "half a pair: \ud83d"
    save(benchmark_of([run_of([record])]), tmp_path)
    assert load(tmp_path).runs[0].requests[0].error == "half a pair: ?"


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("benchmark.json", '"schema": 1', '"schema": 2', "schema 2"),
        ("benchmark.json", '"runs": 4', '"runs": 5', r"004\.jsonl is missing"),
        ("benchmark.json", '"runs": 4', '"runs": -1', "claims -1 runs"),
        ("benchmark.json", "{", "[", "cannot be read"),
        ("runs/001.jsonl", '"schema":1', '"schema":7', r"001\.jsonl line 1 has schema 7"),
        ("runs/001.jsonl", '"requests":30', '"requests":31', "holds 30 of 31 requests"),
        ("runs/001.jsonl", '"outcome":"ok"', '"outcome":"fine"', r"001\.jsonl line 2 cannot be read"),
        ("runs/001.jsonl", '"tokens":[1,', '"tokens":[', "in pairs"),
        ("runs/001.jsonl", '"qps":2.0', '"qps":null', "one of load"),
        ("runs/001.jsonl", '"intended":', '"intended":"', "line 2 cannot be read"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, old: str, new: str, message: str) -> None:
    replace_text(folder / name, old, new)
    with pytest.raises(StorageError, match=message) as caught:
        load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["benchmark.json", "runs/000.jsonl"])
def test_bytes_that_are_no_text_are_named(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b'{"schema": 1, "title": "\xff\xfe"}')
    with pytest.raises(StorageError, match="cannot be read"):
        load(folder)


@pytest.mark.parametrize("name", ["benchmark.json", "runs/000.jsonl", "runs"])
def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(StorageError, match="leads out of the results folder"):
        load(folder)


def test_no_folder_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        load(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        save(benchmark_of([run_of([answered(0.0)])]), tmp_path / "file")
