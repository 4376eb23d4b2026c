"""Results on disk: benchmark.json (what and where, and a summary), runs/NNN.jsonl (one line a request), levels.csv."""

import csv
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from bladellm_runtime.errors import UserError
from bladellm_tools.bench.figures import LevelFigures, level_figures
from bladellm_tools.bench.metrics import FIGURES
from bladellm_tools.bench.records import Benchmark, ClientHealth, LevelRun, Load, RequestRecord

SCHEMA = 1
MAX_RUNS = 100_000
MAX_LINE = 64 * 2**20
Stored = TypeVar("Stored")


class StorageError(UserError):
    """A results folder that cannot be written or read; the text names the file."""


@dataclass(frozen=True)
class StoredBenchmark:
    """What load() needs of benchmark.json; its `levels` are for people and other programs, and are not read back."""

    schema: int
    title: str
    flags: dict[str, Any]
    environment: dict[str, str]
    runs: int
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class StoredRun:
    """First line of a runs file: a `LevelRun` with the number of its requests, which follow one a line."""

    schema: int
    endpoint: str
    load: Load
    repeat: int
    seed: int
    began: float
    duration: float
    warmup: float
    requests: int
    client: ClientHealth
    aborted: str | None = None


def run_file(number: int) -> str:
    """Path of a run inside the folder."""
    return f"runs/{number:03d}.jsonl"


UNFINISHED = "The measurement did not come to its end: levels that follow are missing."
"""Note of what `save_newest` leaves."""


def save(benchmark: Benchmark, folder: Path | str, figures: Sequence[LevelFigures] | None = None) -> None:
    """Write everything into the folder, each file as a whole or not at all; benchmark.json comes last.

    `figures` are the levels to summarise; default: computed here, without goodput.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = Path(folder)
    if figures is None:
        figures = level_figures(benchmark)
    for number, run in enumerate(benchmark.runs):
        save_run(run, folder, number)
    with _replacing(folder / "levels.csv") as file:
        file.write(levels_csv(figures).encode(errors="replace"))
    _save_facts(benchmark, folder, figures, benchmark.notes)


def save_newest(benchmark: Benchmark, folder: Path) -> None:
    """Write the newest run, those before it being there, so that `load` finds what was measured, whatever comes.

    Raises:
        StorageError: the folder cannot be written.
    """
    save_run(benchmark.runs[-1], folder, len(benchmark.runs) - 1)
    _save_facts(benchmark, folder, [], [*benchmark.notes, UNFINISHED])


def _save_facts(benchmark: Benchmark, folder: Path, figures: Sequence[LevelFigures], notes: Sequence[str]) -> None:
    stored = {
        "schema": SCHEMA,
        "title": benchmark.title,
        "flags": benchmark.flags,
        "environment": benchmark.environment,
        "runs": len(benchmark.runs),
        "notes": notes,
        "levels": [level_summary(level) for level in figures],
    }
    with _replacing(folder / "benchmark.json") as file:
        file.write(msgspec.json.format(_encode(stored), indent=1) + b"\n")


def save_run(run: LevelRun, folder: Path | str, number: int) -> None:
    """Write one run, line by line."""
    fields = {name: getattr(run, name) for name in StoredRun.__dataclass_fields__ if name not in ("schema", "requests")}
    with _replacing(Path(folder) / run_file(number)) as file:
        file.write(_encode(StoredRun(schema=SCHEMA, requests=len(run.requests), **fields)) + b"\n")
        for record in run.requests:
            file.write(_encode(record) + b"\n")


def load(folder: Path | str) -> Benchmark:
    """Read a folder that `save` wrote. Nothing outside it is read, not through a link either.

    Raises:
        StorageError: a file that is missing, of another schema, damaged or cut short; the text names file and line.
    """
    folder = Path(folder)
    with _opened(folder, "benchmark.json") as file:
        stored = _decode(file.read(MAX_LINE), StoredBenchmark, "benchmark.json")
    if not 0 <= stored.runs <= MAX_RUNS:
        raise StorageError(f"benchmark.json of {folder} claims {stored.runs} runs; 0 to {MAX_RUNS:,} can be read.")
    runs = [load_run(folder, number) for number in range(stored.runs)]
    return Benchmark(stored.title, stored.flags, stored.environment, runs, stored.notes)


def load_run(folder: Path | str, number: int) -> LevelRun:
    """Read one run, line by line. Raises `StorageError`."""
    name = run_file(number)
    with _opened(Path(folder), name) as file:
        stored = _decode(file.readline(MAX_LINE), StoredRun, f"{name} line 1")
        records = [_record(line, f"{name} line {place}") for place, line in enumerate(_lines(file), start=2)]
    if len(records) != stored.requests:
        raise StorageError(f"{name} of {folder} holds {len(records)} of {stored.requests} requests; it was cut short.")
    if (stored.load.qps is None) == (stored.load.concurrency is None):
        raise StorageError(f"{name} line 1 of {folder} must set one of load.qps and load.concurrency.")
    fields = {
        name: getattr(stored, name) for name in StoredRun.__dataclass_fields__ if name not in ("schema", "requests")
    }
    return LevelRun(requests=records, **fields)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(MAX_LINE):
        yield line


def _record(line: bytes, where: str) -> RequestRecord:
    record = _decode(line, RequestRecord, where)
    if len(record.times) != len(record.tokens):
        raise StorageError(f"{where} has {len(record.times)} times and {len(record.tokens)} tokens; they go in pairs.")
    return record


def _decode(data: bytes, kind: type[Stored], where: str) -> Stored:
    """One JSON document of a type, of our schema where the type has one."""
    try:
        value = msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StorageError(f"{where} cannot be read: {error}.") from None
    if getattr(value, "schema", SCHEMA) != SCHEMA:
        found = getattr(value, "schema", None)
        raise StorageError(f"{where} has schema {found}, this version reads {SCHEMA}; use the version that wrote it.")
    return value


@contextmanager
def _opened(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A plain file that lies in the folder, open for reading."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise StorageError(f"{path} leads out of the results folder; put the file itself there.")
        if not path.is_file():
            raise StorageError(f"{path} is missing; give a folder that blade_llm_bench wrote.")
        file = path.open("rb")
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}.") from None
    with file:
        yield file


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` once it is written whole."""
    part = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"{path} cannot be written: {error.strerror}.") from None
        raise


def _encode(value: Any) -> bytes:
    """JSON of a value; characters that UTF-8 cannot hold become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return msgspec.json.encode(_cleaned(msgspec.to_builtins(value)))


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


def level_summary(level: LevelFigures) -> dict[str, Any]:
    """A level for benchmark.json: its counts, marks and notes, and every figure that has a value."""
    figures = {
        name: {
            "value": figure.value,
            "low": figure.interval.low if figure.interval else None,
            "high": figure.interval.high if figure.interval else None,
            "cv": figure.cv,
        }
        for name, figure in level.values.items()
        if figure.value is not None
    }
    return {
        "endpoint": level.endpoint,
        "load": level.load,
        "repeats": len(level.runs),
        "requests": level.requests,
        "completed": level.completed,
        "outcomes": level.outcomes,
        "http": level.http,
        "oversaturated": level.oversaturated,
        "client_limited": level.client_limited,
        "notes": level.notes,
        "windows": [run.window for run in level.runs],
        "figures": figures,
    }


def levels_csv(figures: Sequence[LevelFigures]) -> str:
    """One row a level; every figure with the ends of its interval; an empty cell where there is none."""
    text = io.StringIO()
    counts = ("endpoint", "qps", "concurrency", "repeats", "requests", "completed", "failed", "marks")
    names = [column for name in FIGURES for column in (name, f"{name}_low", f"{name}_high")]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*counts, *names])
    for level in figures:
        row: list[object] = [level.endpoint, level.load.qps, level.load.concurrency, len(level.runs)]
        row += [level.requests, level.completed, level.failed, level.marks]
        for name in FIGURES:
            figure = level.values[name]
            row += [figure.value, *((figure.interval.low, figure.interval.high) if figure.interval else (None, None))]
        writer.writerow(row)
    return text.getvalue()
