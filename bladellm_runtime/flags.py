"""Fields of flag dataclasses, and how their values are checked against types, ranges and choices."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from bladellm_runtime.errors import ConfigError


def flag(
    default: Any,
    help: str,
    *,
    group: str,
    low: float | None = None,
    high: float | None = None,
    names: tuple[str, ...] = (),
    instead: Mapping[str, str] = types.MappingProxyType({}),
) -> Any:
    """A dataclass field that is also a flag; `low` and `high` are inclusive, `names` are extra spellings.

    `instead` says what to use in place of values that BladeLLM has and this does not.
    """
    metadata = {"help": help, "group": group, "low": low, "high": high, "names": names, "instead": instead}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def check_fields(args: Any) -> None:
    """Check every field of a flag dataclass against its type, range and choices.

    Raises `ConfigError` naming the flag, the value and what is allowed.
    """
    hints = typing.get_type_hints(type(args))
    for item in dataclasses.fields(args):
        value = getattr(args, item.name)
        kind, optional = unwrap_optional(hints[item.name])
        if value is None and optional:
            continue
        if isinstance(value, str) and value in item.metadata["instead"]:
            raise ConfigError(f"--{item.name} {value} is not supported; use {item.metadata['instead'][value]}")
        _check_type(item.name, value, kind)
        _check_text(item.name, value)
        low, high = item.metadata["low"], item.metadata["high"]
        for one in value if isinstance(value, list) else [value]:
            if low is not None and not low <= one <= high:
                raise ConfigError(f"--{item.name} must be between {low:g} and {high:g}, got {one:g}")


def unwrap_optional(hint: Any) -> tuple[Any, bool]:
    """`T | None` -> (T, True); any other hint -> (hint, False)."""
    if isinstance(hint, types.UnionType):
        inner = [option for option in typing.get_args(hint) if option is not type(None)]
        return inner[0], True
    return hint, False


def _check_text(name: str, value: Any) -> None:
    """Refuse characters that no path and no command line can hold; only a recipe can give them."""
    if any("\0" in text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)):
        raise ConfigError(f"--{name} must be text without NUL characters")


def _check_type(name: str, value: Any, kind: Any) -> None:
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        if value not in choices:
            raise ConfigError(f"--{name} must be one of {', '.join(choices)}; got {value!r}")
    elif typing.get_origin(kind) is list:
        (one,) = typing.get_args(kind)
        if not isinstance(value, list) or not all(isinstance(item, one) and type(item) is not bool for item in value):
            words = {str: "strings", int: "whole numbers"}[one]
            raise ConfigError(f"--{name} must be a list of {words}, got {value!r}")
    elif kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"--{name} must be a finite number, got {value!r}")
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"--{name} must be of type {kind.__name__}, got {value!r}")
