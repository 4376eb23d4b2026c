"""From text files to windows of tokens: documents joined by two newlines, tokenized once, cut without overlap."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_runtime.text.tokenizer import Tokenizer
from bladellm_tools.parquet import stream_rows

FIELD = "text"
SEPARATOR = "\n\n"
MAX_FILE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class EvaluationText:
    """A text to evaluate on, and what reports call it."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class TextWindows:
    """int64 [W, T] windows of a text's tokens; `tokens` counts the whole text."""

    name: str
    tokens: int
    windows: torch.Tensor


def read_text(path: str) -> EvaluationText:
    """A text file, named by its path; the documents of .jsonl and .parquet are joined.

    Raises `UserError` naming file and line for one that cannot be read or holds no text.
    """
    readers = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
    file = Path(path)
    if file.suffix not in readers:
        raise ConfigError(f"--data {path}: the name must end in {', '.join(readers)}")
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"--data {path} is larger than {MAX_FILE_BYTES} bytes; give a part of it")
        text = SEPARATOR.join(readers[file.suffix](file))
    except OSError as error:
        raise UserError(f"--data {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--data {path} is not UTF-8 text") from error
    if not text.strip():
        raise UserError(f"--data {path} holds no text")
    return EvaluationText(path, text)


def tokenize(text: EvaluationText, tokenizer: Tokenizer, window: int, max_windows: int | None) -> TextWindows:
    """Tokens as the tokenizer gives them for a whole text, its own special tokens included, cut into windows.

    Raises `UserError` for a text below one window.
    """
    ids = tokenizer.encode(text.text, param=text.name)
    if len(ids) < window:
        # A window of one token has no target.
        advice = f"give a longer text or --window {len(ids)}" if len(ids) > 1 else "give a longer text"
        raise UserError(f"{text.name} has {len(ids)} tokens, below one window of {window}; {advice}")
    return TextWindows(text.name, len(ids), cut(torch.tensor(ids), window, max_windows))


def cut(ids: torch.Tensor, window: int, max_windows: int | None = None) -> torch.Tensor:
    """ids [N] -> [W, window]: from the start, without overlap, the last partial window dropped."""
    count = len(ids) // window
    if max_windows is not None:
        count = min(count, max_windows)
    return ids[: count * window].view(count, window)


def _read_txt(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        yield lines.read()


def _read_jsonl(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _document(line, f"--data {file} line {number}")


def _document(line: bytes, place: str) -> str:
    try:
        content = msgspec.json.decode(line.removeprefix(BOM_UTF8))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{place} is not JSON: {error}") from error
    text = content.get(FIELD) if isinstance(content, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{place} must be an object whose field {FIELD!r} is a string")
    return text


def _read_parquet(file: Path) -> Iterator[str]:
    if not file.is_file():
        raise FileNotFoundError(2, "No such file or directory")
    columns, texts = _parquet_column(file)
    if columns and FIELD not in columns:
        raise UserError(f"--data {file} has no column {FIELD!r}; it has {', '.join(columns)[:200]}")
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UserError(f"--data {file} row {number}: {FIELD!r} must be a string")
        yield text


def _parquet_column(file: Path) -> tuple[list[str], list[object]]:
    """Names of the columns, none of a file without rows, and the values of `text`."""
    columns: list[str] = []
    texts: list[object] = []
    try:
        for row in stream_rows(file):
            columns = columns or list(row)
            texts.append(row.get(FIELD))
    except Exception as error:  # its readers raise types of several libraries
        raise UserError(f"--data {file} is not a readable parquet file ({type(error).__name__})") from error
    return columns, texts
