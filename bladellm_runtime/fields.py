"""`Fields`: a JSON object of a model folder read field by field, every problem named by file and field."""

import math
from pathlib import Path
from typing import Any

from bladellm_runtime.errors import CheckpointError


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
