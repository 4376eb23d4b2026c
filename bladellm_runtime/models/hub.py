"""From what --model says to a folder on disk: a path, a Hugging Face hub id, or modelscope:org/name."""

import os
import re
from pathlib import Path

from bladellm_runtime.errors import CheckpointError

MODELSCOPE = "modelscope:"
WANTED_FILES = ["*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model"]
"""Never *.bin (pickle) nor *.py (code)."""
UNWANTED_FILES = ["*/*", "consolidated*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")


def resolve_model(name: str) -> Path:
    """The model folder `name` stands for, downloaded if it is a hub id that is not cached yet.

    Raises `CheckpointError` when there is no such folder or it cannot be downloaded.
    """
    if name.startswith(MODELSCOPE):
        return _download_from_modelscope(name.removeprefix(MODELSCOPE))
    path = Path(name).expanduser()
    if name and os.path.isdir(path):
        return path.absolute()
    if name and os.path.exists(path):
        raise CheckpointError(f"--model {name} is a file; give the folder that holds config.json")
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"--model {name!r} is neither a folder nor a hub id like org/name")
    return _download_from_hub(name)


def _download_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES))
    except Exception as error:  # the hub's client and its HTTP library raise many unrelated types
        raise CheckpointError(
            f"--model {name} is not a folder here and could not be downloaded from the Hugging Face hub "
            f"({type(error).__name__}: {_first_line(error)}); check the name and the network, or give a local folder"
        ) from error


def _download_from_modelscope(name: str) -> Path:
    if not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"--model {MODELSCOPE}{name} must be {MODELSCOPE}org/name")
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"--model {MODELSCOPE}{name} needs the modelscope package; install bladellm-open[modelscope]"
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED_FILES, ignore_patterns=UNWANTED_FILES))
    except Exception as error:  # as above
        raise CheckpointError(
            f"--model {MODELSCOPE}{name} could not be downloaded from ModelScope "
            f"({type(error).__name__}: {_first_line(error)}); check the name and the network, or give a local folder"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no details"
