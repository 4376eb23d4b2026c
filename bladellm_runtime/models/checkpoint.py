"""Safetensors of a model folder, one file or sharded: opened, checked against a weight table, read tensor by tensor."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.folder import file_in, read_json
from bladellm_runtime.models.quantized import Expected, Schemes, expected_tensors, find_schemes
from bladellm_runtime.models.ranges import FileRange, read_ranges
from bladellm_runtime.models.weights import WeightTable, is_harmless

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_SHARDS = 4096

logger = logging.getLogger(__name__)


class Checkpoint:
    """Open safetensors files: `files` gives the file of each key, `index` the file that promised the keys, if any."""

    def __init__(self, handles: dict[Path, Any], files: dict[str, Path], index: Path | None) -> None:
        self._handles = handles
        self.files = files
        self.index = index
        self._ranges: dict[str, FileRange] = {}

    @property
    def paths(self) -> list[Path]:
        """The safetensors files."""
        return sorted(self._handles)

    def check(self, table: WeightTable, spec: ModelSpec) -> Schemes:
        """The schemes of the linear layers that are quantized.

        Raises `CheckpointError`, naming file and key, unless the tensors are exactly those of the table as stored.
        """
        where = self.index or next(iter(self.files.values()), Path(SINGLE_FILE))
        schemes = find_schemes(spec, table, self.files.keys(), where)
        expected = expected_tensors(spec, table, schemes, where)
        _refuse([key for key, one in expected.items() if one.required and key not in self.files], where, "missing")
        self._refuse_extra([key for key in self.files if key not in expected], spec, schemes)
        for key, one in expected.items():
            if key in self.files:
                self._check_tensor(key, one)
        return schemes

    def read(self, key: str) -> torch.Tensor:
        """One tensor, mapped from its file."""
        try:
            tensor: torch.Tensor = self._handles[self.files[key]].get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.files[key]}: {key} cannot be read: {error}") from error
        return tensor

    def view(self, key: str) -> Any:
        """One tensor to slice without reading the rest of it, as `safe_open` gives it."""
        return self._handles[self.files[key]].get_slice(key)

    def locate(self, key: str) -> FileRange:
        """Where one tensor lies in its file."""
        if key not in self._ranges:
            self._ranges |= read_ranges(self.files[key])
        return self._ranges[key]

    def _refuse_extra(self, keys: list[str], spec: ModelSpec, schemes: Schemes) -> None:
        """Refuse tensors outside the table, but for those that change nothing."""
        weights = [key for key in keys if not key.endswith(".bias")]
        unused = [key for key in weights if spec.quantization is not None and spec.quantization.is_harmless(key)]
        if unused:
            logger.info("%s and %d more scales are not used: the KV cache is not quantized", unused[0], len(unused) - 1)
        known = {*unused, *(key for key in keys if is_harmless(key, spec) or self._is_empty_bias(key, schemes))}
        extra = [key for key in keys if key not in known]
        doubled = [key for key in extra if key.removesuffix(".weight") in schemes]
        if doubled:
            _refuse(doubled, self.files[doubled[0]], "there beside quantized tensors of the same layer")
        _refuse(extra, self.files[extra[0]] if extra else Path(), f"not part of {spec.architecture}")

    def _is_empty_bias(self, key: str, schemes: Schemes) -> bool:
        """Whether it is the bias, all zero, that some quantizers give every linear layer."""
        return key.endswith(".bias") and key.removesuffix(".bias") in schemes and not bool(self.read(key).any())

    def _check_tensor(self, key: str, expected: Expected) -> None:
        view = self.view(key)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if dtype not in expected.dtypes:
            types = ", ".join(expected.dtypes)
            raise CheckpointError(f"{self.files[key]}: {key} is of type {dtype}; it must be one of {types}")
        if shape != expected.shape:
            asked = f"config.json's {expected.fields} ask for {list(expected.shape)}"
            raise CheckpointError(f"{self.files[key]}: {key} has shape {list(shape)}, but {asked}")


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
