"""Recipes: YAML files with the values of flags, `name: value`, one command's worth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from bladellm_runtime.errors import ConfigError
from bladellm_tools.flags import Flag, nearest, shown

MAX_RECIPE_BYTES = 1 << 20
SECRETS = ("api_key",)
"""Flags whose values are never printed."""


def read_recipe(path: str, flags: Sequence[Flag]) -> dict[str, Any]:
    """The values of a recipe, converted to the types of their flags.

    Raises `ConfigError` naming the file and key: not readable, not a mapping, unknown or repeated key, bad value.
    """
    known = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}
    for key, value in _load(path).items():
        if key not in known:
            close = nearest(str(key), known)
            hint = f"did you mean {close!r}?" if close else "--help lists the names"
            raise ConfigError(f"{path}: unknown key {shown(key)}; {hint}")
        try:
            values[key] = known[key].convert(value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {str(error).removeprefix('--')}") from error
    return values


def _load(path: str) -> dict[Any, Any]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_RECIPE_BYTES + 1)
        if len(data) > MAX_RECIPE_BYTES:
            raise ConfigError(f"--config {path} is larger than {MAX_RECIPE_BYTES} bytes; a recipe is a page of YAML")
        text = data.decode()
        _refuse_repeated_keys(path, text)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path} is not UTF-8 text") from error
    except (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError) as error:
        # The last two from values that are not of the kind that their tag names, as `!!bool maybe`.
        raise ConfigError(f"--config {path} is not valid YAML{_where(error)}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path} must hold `name: value` lines")
    return content


def _refuse_repeated_keys(path: str, text: str) -> None:
    """YAML readers keep the last of two equal keys without a word; a recipe must not lose a value that way."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for key, _ in node.value:
        if str(key.value) in seen:
            raise ConfigError(f"{path}: key {shown(key.value)} appears twice, the second time in line {_line(key)}")
        seen.add(str(key.value))


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _where(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def to_yaml(values: dict[str, Any]) -> str:
    """Values as a recipe that `--config` reads back; secrets are left out."""
    kept = {name: value for name, value in values.items() if name not in SECRETS}
    return str(yaml.safe_dump(kept, sort_keys=False, allow_unicode=True, default_flow_style=False))
