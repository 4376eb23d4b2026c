"""Typed reading of request fields. Every value is a client's, so every wrong type ends in an `ApiError` 400."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bladellm_runtime.server.errors import ApiError, invalid_request, shown

MAX_LISTED_FIELDS = 16
_LISTABLE = re.compile(r"[A-Za-z0-9_.\-]{1,64}")


class Fields:
    """The fields of one request object; a field that was read is known, what is left over is not.

    A field set to null counts as left out. `prefix` (such as `stream_options.`) leads the names in messages.
    """

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        self._body = body
        self._prefix = prefix
        self._known: set[str] = set()

    def take(self, name: str) -> Any:
        """The raw value, or None."""
        self._known.add(name)
        return self._body.get(name)

    def given(self, name: str) -> bool:
        """Whether the field is present and not null."""
        return self.take(name) is not None

    def ignore(self, names: Sequence[str] | frozenset[str]) -> None:
        """Accept these fields without a use for them."""
        self._known.update(names)

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong_type(name, "true or false", value)
        return value

    def switch(self, name: str) -> bool:
        """A boolean that may also be written as the string "true" or "false", as some BladeLLM clients do."""
        value = self.take(name)
        if isinstance(value, str) and value in ("true", "false"):
            return value == "true"
        return self.boolean(name)

    def integer(self, name: str) -> int | None:
        value = self.take(name)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.wrong_type(name, "an integer", value)

    def number(self, name: str) -> float | None:
        value = self.take(name)
        return None if value is None else as_number(self._prefix + name, value)

    def string(self, name: str) -> str | None:
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong_type(name, "a string", value)

    def integers(self, name: str, most: int) -> list[int]:
        value = self.take(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.wrong_type(name, "a list of integers", value)
        if len(value) > most:
            raise invalid_request(f"{name} takes at most {most} entries, got {len(value)}", name)
        for place, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.wrong_type(f"{name}[{place}]", "an integer", item)
        return value

    def object(self, name: str) -> dict[str, Any] | None:
        value = self.take(name)
        if value is None or isinstance(value, dict):
            return value
        raise self.wrong_type(name, "an object", value)

    def left_over(self) -> list[str]:
        """Names of the fields nobody read, sorted, with the prefix."""
        return sorted(self._prefix + name for name in self._body if name not in self._known)

    def wrong_type(self, name: str, wanted: str, value: Any) -> ApiError:
        return wrong_type(self._prefix + name, wanted, value)


def wrong_type(name: str, wanted: str, value: Any) -> ApiError:
    """The 400 for a field whose value is not what it must be."""
    return invalid_request(f"{name} must be {wanted}, got {shown(value)}", name)


def as_number(name: str, value: Any) -> float:
    """`value` as a number that arithmetic can handle; its range is not checked here. Raises `ApiError` 400."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(name, "a number", value)
    # An integer may be too large to become a float at all.
    if isinstance(value, int) and abs(value) > 2**63:
        raise invalid_request(f"{name} is out of range, got {shown(value)}", name)
    return value


def ignored_fields(names: Sequence[str], strict: bool) -> tuple[str, ...]:
    """The unknown fields a response header may list: at most `MAX_LISTED_FIELDS`, none with odd characters.

    Raises `ApiError` 400 for the first unknown field when `strict`.
    """
    if names and strict:
        raise invalid_request(
            f"Unknown field {shown(names[0])}: leave it out, or start the server without --strict_params",
            names[0][:64],
            "unknown_field",
        )
    return tuple(name for name in names if _LISTABLE.fullmatch(name))[:MAX_LISTED_FIELDS]
