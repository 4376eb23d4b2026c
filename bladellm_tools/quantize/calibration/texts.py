"""Calibration texts from where a user keeps them: the command line, a file, a data set of the hub, or the package.

A document is a text, or the messages of a chat. JSON lines are read here, so that a mistake is named by its line;
parquet files and hub names through the `datasets` library, streamed, without any code of theirs.
"""

import gzip
import logging
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import msgspec

from bladellm_runtime.errors import ConfigError, UserError
from bladellm_tools.flags import shown
from bladellm_tools.parquet import stream_rows

Document = str | list[dict[str, Any]]
MAX_LINE_BYTES = 64 * 2**20
MAX_FILE_BYTES = 2**30
MAX_CHARACTERS = 2**28
"""Of the texts of one file or data set: a thousand times what calibration uses."""
PAGE = "\f"
"""Separates the documents of a .txt file."""
FLAG = "--calib_data_file"
ADVICE = 'write {"text": "..."} or {"messages": [...]} on every line'
LINE_FILES, TABLE_FILES, TEXT_FILES = (".jsonl", ".json"), (".parquet",), (".txt", ".md")


def built_in(name: str = "calibration") -> list[Document]:
    """The documents of the package's own text: `calibration`, or `held_out`, which shares no work with it."""
    data = files("bladellm_tools.quantize.calibration").joinpath("data", f"{name}.txt.gz").read_bytes()
    return _pages(gzip.decompress(data).decode())


def read_documents(source: str, flag: str = FLAG) -> list[Document]:
    """The documents of a file, or of a data set of the hub.

    Raises `UserError` naming the flag, the file and the line for what cannot be read or holds no text.
    """
    path = Path(source).expanduser()
    if not path.is_file():
        if path.suffix in (*LINE_FILES, *TABLE_FILES, *TEXT_FILES) or path.exists() or "/" not in source.strip("/."):
            raise ConfigError(f"{flag} {source} is no file; give a .jsonl, .parquet or .txt file, or a hub data set")
        documents = read_hub(source, flag)
    else:
        documents = _read_file(path, flag)
    if not documents:
        raise UserError(f"{flag} {source} holds no text; {ADVICE}")
    return documents


def _read_file(path: Path, flag: str) -> list[Document]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{flag} {path} is larger than 1 GiB; 100 to 1,000 representative texts are enough")
        if path.suffix in LINE_FILES:
            return _bounded(_read_lines(path, flag), f"{flag} {path}")
        if path.suffix in TABLE_FILES:
            return read_parquet(path, flag)
        if path.suffix in TEXT_FILES:
            return _bounded(_pages(path.read_text(encoding="utf-8-sig")), f"{flag} {path}")
    except OSError as error:
        raise UserError(f"{flag} {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{flag} {path} is not UTF-8 text (byte {error.start})") from error
    raise ConfigError(f"{flag} {path} must end in .jsonl, .json, .parquet, .txt or .md")


def _pages(text: str) -> list[Document]:
    return [page.strip() for page in text.split(PAGE) if page.strip()]


def _bounded(documents: Iterable[Document], place: str) -> list[Document]:
    kept: list[Document] = []
    total = 0
    for document in documents:
        total += len(document) if isinstance(document, str) else sum(len(str(message)) for message in document)
        if total > MAX_CHARACTERS:
            raise UserError(f"{place} holds more than {MAX_CHARACTERS} characters; 100 to 1,000 texts are enough")
        kept.append(document)
    return kept


def _read_lines(path: Path, flag: str) -> Iterator[Document]:
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{flag} {path} line {number}"
            if len(raw) > MAX_LINE_BYTES:
                raise UserError(f"{place} is longer than {MAX_LINE_BYTES} bytes; give shorter texts")
            if raw.strip():
                document = parse_line(raw, place)
                if document:
                    yield document


def parse_line(raw: bytes, place: str) -> Document:
    """The document of one line of JSON. Raises `UserError` that begins with `place`."""
    try:
        content = msgspec.json.decode(raw.removeprefix(BOM_UTF8))
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"{place} is not JSON: {error}; {ADVICE}") from error
    return document_of(content, place)


def document_of(content: object, place: str) -> Document:
    """The document of one record: `text`, BladeLLM's `content` parts, `messages`, or the record when it is text."""
    if isinstance(content, str):
        return content.strip()
    if not isinstance(content, dict):
        raise UserError(f"{place} is {shown(content)}; {ADVICE}")
    if isinstance(content.get("text"), str):
        return str(content["text"]).strip()
    if isinstance(content.get("messages"), list):
        return _messages(content["messages"], place)
    if isinstance(content.get("content"), list):
        return "\n".join(_part(part, place) for part in content["content"]).strip()
    raise UserError(f"{place} has no key 'text' with a text, nor 'messages' or 'content' with a list; {ADVICE}")


def _messages(messages: list[object], place: str) -> list[dict[str, Any]]:
    if not all(isinstance(message, dict) for message in messages):
        raise UserError(f"{place}: every message must be an object with role and content")
    return [dict(message) for message in messages if isinstance(message, dict)]


def _part(part: object, place: str) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    if isinstance(part, dict) and "image" in part:
        raise UserError(f"{place} holds an image, and models that read images are not supported; leave the line out")
    raise UserError(f"{place}: a part of content must be an object with a text, got {shown(part)}")


def read_parquet(path: Path, flag: str = FLAG) -> list[Document]:
    """The column `text` (or `messages`) of a parquet file."""
    place = f"{flag} {path}"
    try:
        return _bounded(_records(stream_rows(path), place), place)
    except UserError:
        raise
    except Exception as error:  # pyarrow and datasets raise many unrelated types for a broken file
        raise UserError(f"{place} is not a parquet file that can be read: {_first_line(error)}") from error


def read_hub(name: str, flag: str = FLAG) -> list[Document]:
    """The split `train` of a data set of the hub, `ORG/NAME` or `ORG/NAME:CONFIGURATION`, up to the bound on texts."""
    place = f"{flag} {name}"
    data, _, configuration = name.partition(":")
    try:
        from datasets import load_dataset

        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # it tells of every retry
        rows = load_dataset(data, configuration or None, split="train", streaming=True)
        return list(_first(_records(rows, place)))
    except UserError:
        raise
    except Exception as error:  # the hub's client and its HTTP library raise many unrelated types
        raise UserError(
            f"{place} is no file here and could not be read from the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)}); check the name and the network, or give a file"
        ) from error


HUB_CHARACTERS = 2**24
"""Texts taken of a data set of the hub, which may be endless."""


def _first(documents: Iterable[Document]) -> Iterator[Document]:
    total = 0
    for document in documents:
        yield document
        total += len(document) if isinstance(document, str) else sum(len(str(message)) for message in document)
        if total > HUB_CHARACTERS:
            return


def _records(rows: Iterable[dict[str, Any]], place: str) -> Iterator[Document]:
    for number, row in enumerate(rows, 1):
        document = document_of(row, f"{place} row {number}")
        if document:
            yield document


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
