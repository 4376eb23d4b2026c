"""Reading a model folder: only files inside it, JSON of a bounded size, problems as one sentence."""

import json
import os
from pathlib import Path
from typing import Any

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.fields import Fields

MAX_JSON_BYTES = 64 * 1024 * 1024
MAX_VOCAB_SIZE = 2**22


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


def read_vocab_size(folder: Path) -> int:
    """How many tokens the model of a folder has embeddings for. Raises `CheckpointError`."""
    file = file_in(folder, "config.json")
    return vocab_size_of(Fields(file, read_json(file)))


def vocab_size_of(config: Fields) -> int:
    """The same of the config.json that has been read."""
    return config.integer("vocab_size", 1, MAX_VOCAB_SIZE)


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
