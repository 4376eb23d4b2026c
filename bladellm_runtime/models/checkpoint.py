"""Safetensors of a model folder, one file or sharded: opened, checked against a weight table, read tensor by tensor."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.folder import file_in, read_json
from bladellm_runtime.models.weights import Part, WeightTable, is_harmless

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 4096
DTYPES = ("F32", "BF16", "F16")


class Checkpoint:
    """Open safetensors files: `files` gives the file of each key, `index` the file that promised the keys, if any."""

    def __init__(self, handles: dict[Path, Any], files: dict[str, Path], index: Path | None) -> None:
        self._handles = handles
        self.files = files
        self.index = index

    def check(self, table: WeightTable, spec: ModelSpec) -> None:
        """Raise `CheckpointError`, naming file and key, unless the tensors are exactly those of the table."""
        parts = {part.key: part for row in table.values() for part in row}
        where = self.index or next(iter(self.files.values()), Path(SINGLE_FILE))
        _refuse([key for key in parts if key not in self.files], where, "missing")
        extra = [key for key in self.files if key not in parts and not is_harmless(key, spec)]
        _refuse(extra, self.files[extra[0]] if extra else where, f"not part of {spec.architecture}")
        for key, part in parts.items():
            self._check_tensor(key, part)

    def read(self, key: str) -> torch.Tensor:
        """One tensor, mapped from its file."""
        try:
            tensor: torch.Tensor = self._handles[self.files[key]].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.files[key]}: {key} cannot be read: {error}") from error
        return tensor

    def _check_tensor(self, key: str, part: Part) -> None:
        view = self._handles[self.files[key]].get_slice(key)
        shape, dtype = list(view.get_shape()), view.get_dtype()
        if dtype not in DTYPES:
            raise CheckpointError(f"{self.files[key]}: {key} is of type {dtype}; it must be one of {', '.join(DTYPES)}")
        if shape != list(part.shape):
            asked = f"config.json's {part.fields} ask for {list(part.shape)}"
            raise CheckpointError(f"{self.files[key]}: {key} has shape {shape}, but {asked}")


@contextmanager
def open_checkpoint(folder: Path) -> Iterator[Checkpoint]:
    """Open the safetensors of a folder: model.safetensors, or the shards its index names.

    Raises `CheckpointError` for a missing, truncated or outside file, and where index and shards disagree.
    """
    with ExitStack() as stack:
        if (folder / SINGLE_FILE).exists():
            path = file_in(folder, SINGLE_FILE)
            handle = _open(path, stack)
            yield Checkpoint({path: handle}, dict.fromkeys(handle.keys(), path), None)
        else:
            yield _open_shards(folder, stack)


def _open_shards(folder: Path, stack: ExitStack) -> Checkpoint:
    if not (folder / INDEX_FILE).exists():
        raise CheckpointError(
            f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}; convert the weights to safetensors first"
        )
    index = file_in(folder, INDEX_FILE)
    promised = _read_weight_map(index)
    files = {name: file_in(folder, name, _shown(key)) for key, name in promised.items()}
    handles = {path: _open(path, stack) for path in files.values()}
    keys: dict[str, Path] = {}
    for path, handle in handles.items():
        for key in handle.keys():  # noqa: SIM118 (a safetensors handle is no mapping)
            if promised.get(key) != path.name:
                raise CheckpointError(
                    f"{path}: {_shown(key)} is not where {index.name} says; download the model folder again"
                )
            keys[key] = path
    for key, name in promised.items():
        if key not in keys:
            raise CheckpointError(f"{folder / name}: {_shown(key)} is missing, although {index.name} names it")
    return Checkpoint(handles, keys, index)


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object of tensor names and their files")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {_shown(key)} must name a .safetensors file, got {name!r:.80}")
    if len(set(weight_map.values())) > MAX_SHARDS:
        raise CheckpointError(f"{index}: weight_map names more than {MAX_SHARDS} files")
    return weight_map


def _open(path: Path, stack: ExitStack) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file ({error}); download it again") from error


def _refuse(keys: list[str], file: Path, problem: str) -> None:
    if keys:
        more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
        verb = "is" if len(keys) == 1 else "are"
        raise CheckpointError(f"{file}: {', '.join(map(_shown, keys[:3]))}{more} {verb} {problem}")


def _shown(key: str) -> str:
    """A key as a message may hold it: whatever the file says, one short line."""
    return (key if key.isprintable() else repr(key))[:120]
