"""Flags made from the fields of argument dataclasses: their spelling, their values, and the words of their errors.

A field declared with `bladellm_runtime.config.flag` becomes `--name`. Arguments are read BladeLLM's way: hyphens may
stand for underscores, a list flag takes several values (`--served_model_name a b`), a switch takes none or a truth
value (`--disable_overlap`, `--disable_overlap false`).
"""

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bladellm_runtime.errors import ConfigError
from bladellm_runtime.flags import unwrap_optional

TRUTH = {"true": True, "false": False}
ENDLESS = 10**9
"""Help leaves out upper bounds that only exclude nonsense."""
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Flag:
    """One flag: the field's name, the type of one value, and what is allowed."""

    name: str
    kind: Any
    is_list: bool
    optional: bool
    default: Any
    help: str
    group: str
    low: float | None
    high: float | None
    names: tuple[str, ...]
    instead: Mapping[str, str]

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words, empty where any value of the type may do."""
        return typing.get_args(self.kind) if typing.get_origin(self.kind) is Literal else ()

    @property
    def metavar(self) -> str:
        """How help shows the value."""
        if self.choices:
            return "|".join(self.choices)
        if self.kind is bool:
            return "" if self.default is False else "true|false"
        return {int: "INT", float: "FLOAT", str: "TEXT"}[self.kind] + (" ..." if self.is_list else "")

    @property
    def note(self) -> str:
        """Range and default for help, in parentheses; empty where there is neither."""
        parts = []
        if self.low is not None and self.high is not None:
            wide = self.high >= ENDLESS
            parts.append(f"at least {number(self.low)}" if wide else f"{number(self.low)} to {number(self.high)}")
        if self.default is not False and self.default not in (None, "", []):
            parts.append(f"default {self._default_text}")
        return f"({'; '.join(parts)})" if parts else ""

    @property
    def _default_text(self) -> str:
        if self.is_list:
            return " ".join(map(str, self.default))
        if self.kind is bool:
            return str(self.default).lower()
        return number(self.default) if self.kind is float else str(self.default)

    @property
    def allowed(self) -> str:
        """The allowed values in words: `a whole number between 0 and 65535`."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.low is None or self.high is None:
            return WORDS[self.kind]
        return f"{WORDS[self.kind]} between {number(self.low)} and {number(self.high)}"

    def convert(self, value: Any) -> Any:
        """A value from the command line (text) or a recipe (text, number, list, null) as the field's type.

        Raises `ConfigError` saying what is allowed.
        """
        if value is None and self.optional:
            return None
        if self.is_list:
            return [self._convert_one(item) for item in (value if isinstance(value, list) else [value])]
        return self._convert_one(value)

    def _convert_one(self, value: Any) -> Any:
        text = str(value)
        converted = None if isinstance(value, list | dict) or value is None else self._parse(text)
        if text in self.instead:
            raise ConfigError(f"--{self.name} {text} is not supported; use {self.instead[text]}")
        if converted is None:
            raise ConfigError(f"--{self.name} must be {self.allowed}, got {shown(value)}")
        return converted

    def _parse(self, text: str) -> Any:
        """The value the text stands for, or None where it is not allowed."""
        if self.choices:
            return text if text in self.choices else None
        if self.kind is bool:
            return TRUTH.get(text.lower())
        if self.kind is str:
            return text
        try:
            # int() reads thousands of digits slowly and then refuses; no flag needs more than 32.
            value = self.kind(text) if len(text) <= 32 else None
        except ValueError:
            return None
        return value if value is not None and self._in_range(value) else None

    def _in_range(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def shown(value: Any) -> str:
    """A value in an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def number(value: float) -> str:
    """A bound without an exponent where it is a whole number."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def flags_of(arguments: type) -> list[Flag]:
    """The flags of a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(arguments)
    return [make_flag(field, hints[field.name]) for field in dataclasses.fields(arguments)]


def make_flag(field: "dataclasses.Field[Any]", hint: Any) -> Flag:
    """One field as a flag."""
    kind, optional = unwrap_optional(hint)
    is_list = typing.get_origin(kind) is list
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    meta = field.metadata
    return Flag(
        name=field.name,
        kind=typing.get_args(kind)[0] if is_list else kind,
        is_list=is_list,
        optional=optional,
        default=default,
        help=meta["help"],
        group=meta["group"],
        low=meta["low"],
        high=meta["high"],
        names=meta["names"],
        instead=meta["instead"],
    )


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like a misspelt one, or None when none is close."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def normalise(arguments: Sequence[str], flags: Sequence[Flag]) -> list[str]:
    """Command-line arguments as `--name=value`, one value each: the form that no parser can misread.

    Raises `ConfigError` for an unknown flag (naming the nearest), a missing or a stray value. `-h` and `--help` pass.
    """
    spellings = {spelling: flag for flag in flags for spelling in (f"--{flag.name}", *flag.names)}
    rest = list(arguments)
    out: list[str] = []
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help"):
            return ["--help"]
        if not argument.startswith("-") or argument == "-":
            raise ConfigError(f"unexpected argument {shown(argument)}; values follow a flag, as in --model FOLDER")
        spelling, equals, value = argument.partition("=")
        flag = find_flag(spelling, spellings)
        values = take_values(flag, [value] if equals else [], rest)
        out += [f"--{flag.name}={value}" for value in values]
    return out


def find_flag(spelling: str, spellings: dict[str, Flag]) -> Flag:
    """The flag a spelling means; hyphens inside it are underscores."""
    prefix = "--" if spelling.startswith("--") else "-"
    name = prefix + spelling[len(prefix) :].replace("-", "_")
    for candidate in (spelling, name):
        if candidate in spellings:
            return spellings[candidate]
    close = nearest(name, spellings)
    raise ConfigError(
        f"unknown flag {spelling}" + (f"; did you mean {close}?" if close else "; --help lists the flags")
    )


def take_values(flag: Flag, values: list[str], rest: list[str]) -> list[str]:
    """The values of a flag: those given after `=` and those that follow, removed from `rest`."""
    if flag.kind is bool:
        if not values:
            values = [rest.pop(0)] if rest and rest[0].lower() in TRUTH else ["true"]
        return values
    following = _values_ahead(flag, rest)
    if flag.is_list:
        values += list(following)
    elif not values:
        values = [value for value in [next(following, None)] if value is not None]
    if not values:
        raise ConfigError(f"--{flag.name} needs a value: {flag.allowed}")
    return values


def _values_ahead(flag: Flag, rest: list[str]) -> Iterator[str]:
    """Pop arguments while they are values: not flags, but `-` and negative numbers of numeric flags are."""
    while rest:
        ahead = rest[0]
        negative = flag.kind in (int, float) and ahead[1:2].isdigit()
        if ahead.startswith("-") and ahead != "-" and not negative:
            return
        yield rest.pop(0)
