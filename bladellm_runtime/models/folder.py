"""Reading a model folder: only files inside it, JSON of a bounded size, problems as one sentence."""

import json
import math
import os
from pathlib import Path
from typing import Any

from bladellm_runtime.errors import CheckpointError

MAX_JSON_BYTES = 64 * 1024 * 1024


def file_in(folder: Path, name: str, key: str | None = None) -> Path:
    """The path of file `name` of a model folder; `key` is what asked for it, for the message.

    A name with folders in it is refused, as is a link that leads out of the folder. The one place a link may lead to is
    the `blobs` folder that a hub cache keeps beside its snapshots. Raises `CheckpointError`.
    """
    asked_by = "" if key is None else f" (named by {key})"
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise CheckpointError(f"{folder}: {name!r}{asked_by} is not a file name in the model folder")
    path = folder / name
    if not os.path.isfile(path):
        raise CheckpointError(f"{path}{asked_by} is missing; download the model folder again")
    target, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if home not in target.parents and target.parent != blobs:
        raise CheckpointError(f"{path}{asked_by} is a link out of the model folder; copy the file into the folder")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` when the file is too large or is not one."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_JSON_BYTES // 2**20} MiB")
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(values).__name__}")
    return values


class Fields:
    """A JSON object read field by field, each checked; every error names the file and the field.

    `null` counts as missing. A missing field takes `default`, and is an error where there is none.
    """

    def __init__(self, file: Path, values: dict[str, Any], prefix: str = "") -> None:
        self.file = file
        self.values = values
        self.prefix = prefix

    def error(self, name: str, problem: str) -> CheckpointError:
        """The error to raise for a field, as `file: field problem`."""
        return CheckpointError(f"{self.file}: {self.prefix}{name} {problem}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(name, f"must be a whole number from {low} to {high}, got {value!r:.60}")
        return value

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A finite number in [low, high]."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}, got {value!r:.60}")
        if not math.isfinite(value):
            raise self.error(name, f"must be finite, got {value!r}")
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, got {value!r:.60}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, got {value!r:.60}")
        return value

    def nested(self, name: str) -> "Fields":
        """The fields of an object inside this one; missing counts as empty."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, got {value!r:.60}")
        return Fields(self.file, value, f"{self.prefix}{name}.")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value
