"""From what a request names as its model to an adapter's folder: a name given at start, or a path below a root."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bladellm_runtime.errors import ConfigError, ParameterError
from bladellm_runtime.lora.peft_config import CONFIG_FILE

MAX_NAME = 1024
"""Characters of a name."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """name: as asked for. folder: resolved, the adapter's identity: whatever names it has, it is loaded once."""

    name: str
    folder: Path

    @property
    def key(self) -> str:
        """What tells adapters apart, in slots and in the prompt cache."""
        return str(self.folder)


class AdapterNames:
    """Which adapters may be asked for. modules: folders by name. root: any folder below it may be named by its path."""

    def __init__(self, modules: Mapping[str, Path], root: Path | None) -> None:
        self.modules = {name: folder.resolve() for name, folder in modules.items()}
        self.root = None if root is None else root.resolve()

    def find(self, name: str) -> Adapter | None:
        """The adapter of a name; None where it is no name of one. Looks at folders, and opens nothing.

        Raises `ParameterError` for paths that lead out of the root, and for any path where there is none.
        """
        if name in self.modules:
            return Adapter(name, self.modules[name])
        if not name or len(name) > MAX_NAME or not name.isprintable():
            return None
        if self.root is None:
            if _is_foreign(name) or name.startswith("/"):
                raise _not_below_root(name)
            return None
        folder = None if _is_foreign(name) else _resolved(self.root / name)
        if folder is None or self.root not in folder.parents:
            raise _not_below_root(name)
        return Adapter(name, folder) if os.path.isdir(folder) else None


def _is_foreign(name: str) -> bool:
    """Whether a name is a path that may lead out of any root, or an address."""
    return "://" in name or "\\" in name or name.startswith("~") or ".." in name.split("/")


def _resolved(path: Path) -> Path | None:
    """Where a path leads, once and for all: its links may be turned elsewhere a moment later."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # a loop of links
        return None


def _not_below_root(name: str) -> ParameterError:
    return ParameterError(
        f"model {name!r:.120} is not below the folder of adapters; name a folder inside --lora_dir by its relative "
        "path",
        param="model",
        code="model_not_found",
    )


def parse_modules(entries: Sequence[str]) -> dict[str, Path]:
    """`--lora_modules name=path ...`. Raises `ConfigError` for other forms, doubled names, and
    what is no adapter's folder.

    Whether an adapter fits the model is seen when it is first asked for.
    """
    modules: dict[str, Path] = {}
    for entry in entries:
        name, sign, path = entry.partition("=")
        if not (name and sign and path):
            raise ConfigError(f"--lora_modules {entry!r:.120} must be name=path")
        if name in modules:
            raise ConfigError(f"--lora_modules names {name!r:.120} twice; give each adapter a name of its own")
        if not Path(path).is_dir():
            raise ConfigError(f"--lora_modules {entry!r:.120}: {path} is not a folder")
        if not (Path(path) / CONFIG_FILE).is_file():
            raise ConfigError(f"--lora_modules {entry!r:.120} has no {CONFIG_FILE} in it; give a PEFT adapter's folder")
        modules[name] = Path(path)
    return modules
