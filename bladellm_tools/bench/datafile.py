"""Files of --data: prompts (jsonl) and traces, read and checked line by line."""

from codecs import BOM_UTF8
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from bladellm_runtime.errors import ConfigError

MAX_LINES = 2_000_000
MAX_LINE_BYTES = 16 * 1024**2
MAX_TOKENS = 10**7
MILLISECONDS = 1e-3
HASH_BLOCK_TOKENS = 512
"""Tokens that one hash id of a Mooncake trace stands for."""


@dataclass(frozen=True)
class PromptItem:
    """A prompt of a jsonl file, and how long its answer should be where the file says so."""

    prompt: str
    output_len: int | None


@dataclass(frozen=True)
class TraceItem:
    """A request of a trace: seconds, prompt tokens, answer tokens, and the ids of shared blocks where it has them."""

    t: float
    input_len: int
    output_len: int
    hash_ids: tuple[int, ...] = ()


def read_prompts(path: str | None) -> list[PromptItem]:
    """Lines `{"prompt": ..., "output_len": ...}`; the length is optional. Raises `ConfigError` naming file and line."""
    items = []
    for place, row in read_rows(path, "jsonl"):
        prompt = row.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f'{place} needs "prompt", a text')
        items.append(PromptItem(prompt, count(place, row, "output_len") if "output_len" in row else None))
    return items


def read_trace(path: str | None) -> list[TraceItem]:
    """Lines `{"t": seconds, "in": tokens, "out": tokens}`, or Mooncake's names with milliseconds, in order of time.

    Raises `ConfigError` naming file and line.
    """
    items = []
    for place, row in read_rows(path, "trace"):
        mooncake = "timestamp" in row
        names = ("timestamp", "input_length", "output_length") if mooncake else ("t", "in", "out")
        t = row.get(names[0])
        if isinstance(t, bool) or not isinstance(t, int | float) or not 0 <= t <= 1e12:
            raise ConfigError(f'{place} needs "{names[0]}", a time of at least 0')
        seconds = t * MILLISECONDS if mooncake else float(t)
        blocks = hash_ids(place, row)
        items.append(TraceItem(seconds, count(place, row, names[1]), count(place, row, names[2]), blocks))
    return sorted(items, key=lambda item: item.t)


def hash_ids(place: str, row: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the blocks a prompt is made of, where a line has them."""
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(item, int) and 0 <= item < 2**63 for item in ids):
        raise ConfigError(f'{place}: "hash_ids" must be a list of whole numbers of at least 0')
    return tuple(ids)


def count(place: str, row: dict[str, Any], name: str) -> int:
    """A number of tokens."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_TOKENS:
        raise ConfigError(f'{place} needs "{name}", a whole number of tokens between 1 and {MAX_TOKENS}')
    return value


def read_rows(path: str | None, dataset: str) -> list[tuple[str, dict[str, Any]]]:
    """(place, object) of every line that is not empty."""
    if path is None:
        raise ConfigError(f"--dataset {dataset} needs --data FILE")
    rows = []
    try:
        with Path(path).open("rb") as file:
            number = 0
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(line) > MAX_LINE_BYTES or number > MAX_LINES:
                    raise ConfigError(
                        f"--data {path} is too large: {MAX_LINES} lines of {MAX_LINE_BYTES} bytes at most"
                    )
                if line.strip():
                    rows.append(parse_row(f"--data {path} line {number}", line))
    except OSError as error:
        raise ConfigError(f"--data {path} cannot be read: {error.strerror}") from error
    if not rows:
        raise ConfigError(f"--data {path} is empty")
    return rows


def parse_row(place: str, line: bytes) -> tuple[str, dict[str, Any]]:
    """One line as an object."""
    try:
        row = orjson.loads(line.removeprefix(BOM_UTF8))
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{place} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is not a JSON object")
    return place, row
