"""Lists of module names in a `quantization_config`: exact names, and regular expressions after `re:`."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from bladellm_runtime.fields import Fields

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Linear layers that servers load as one, by the name of the whole."""


def read_names(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of strings; missing counts as empty."""
    values: Any = fields.values.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.error(name, f"must be a list of strings, got {values!r:.60}")
    return tuple(values)


def read_pattern(fields: Fields, name: str, expression: str) -> re.Pattern[str]:
    """A regular expression found in the field `name`."""
    try:
        return re.compile(expression)
    except re.error as problem:
        raise fields.error(name, f"has the invalid regular expression {expression!r:.60}: {problem}") from None


@dataclass(frozen=True, slots=True)
class NameList:
    """Module names as compressed-tensors matches them: exactly, by `re:` from the start, or by the class `Linear`."""

    exact: frozenset[str]
    patterns: tuple[tuple[str, re.Pattern[str]], ...]

    @classmethod
    def read(cls, fields: Fields, name: str) -> "NameList":
        """The field `name`. Patterns are kept in alphabetical order, the order compressed-tensors tries them in."""
        names = read_names(fields, name)
        expressions = sorted(entry.removeprefix("re:") for entry in names if entry.startswith("re:"))
        patterns = tuple((expression, read_pattern(fields, name, expression)) for expression in expressions)
        return cls(frozenset(entry for entry in names if not entry.startswith("re:")), patterns)

    def match(self, module: str) -> tuple[int, str] | None:
        """How well a linear layer matches, the least is best: by name, by pattern, by class; None where not at all."""
        if module in self.exact:
            return 0, module
        for expression, pattern in self.patterns:
            if pattern.match(module):
                return 1, expression
        return (2, "Linear") if "Linear" in self.exact else None


def with_fused(modules: Collection[str]) -> tuple[str, ...]:
    """The modules, and the names of fused layers all of whose parts are among them."""
    fused = []
    for module in modules:
        parent, _, own = module.rpartition(".")
        for whole, parts in FUSED.items():
            if own == parts[0] and all(f"{parent}.{part}" in modules for part in parts):
                fused.append(f"{parent}.{whole}")
    return (*modules, *fused)
