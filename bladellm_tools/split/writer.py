"""Safetensors files written tensor by tensor: memory holds none of them, and every byte is hashed on its way."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch

from bladellm_runtime.distributed.manifest import FileRecord
from bladellm_runtime.distributed.shares import as_bytes
from bladellm_runtime.models.checkpoint import INDEX_FILE, SINGLE_FILE
from bladellm_runtime.models.ranges import DTYPES

FILE_BYTES = 4 * 2**30
"""A file is ended when it is this large."""
PIECE = 2**24


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor to be written. `dtype`: the name that safetensors has for it."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class ShareWriter:
    """Writes a folder of safetensors whose tensors are known beforehand, and come in their order."""

    def __init__(self, folder: Path, entries: Sequence[Entry]) -> None:
        self.folder = folder
        self.files: dict[str, FileRecord] = {}
        self._files = _plan_files(entries)
        self._left: list[Entry] = []
        self._handle: BinaryIO | None = None
        self._digest = hashlib.sha256()
        folder.mkdir()

    def put(self, key: str, tensor: torch.Tensor) -> None:
        """Write the next tensor."""
        if self._handle is None:
            self._open()
        entry = self._left.pop(0)
        assert (key, tuple(tensor.shape)) == (entry.key, entry.shape), f"{key} is not the next tensor, {entry}"
        for piece in pieces(tensor):
            self._write(piece)
        if not self._left:
            self._close()

    def finish(self) -> None:
        """Write the index, once every tensor is written."""
        if self._handle is None and not self.files:
            self._open()  # a file without tensors: the rank holds nothing
            self._close()
        assert self._handle is None, "tensors are missing"
        if len(self.files) == 1:
            return
        names = {entry.key: name for name, entries in self._files.items() for entry in entries}
        total = sum(entry.bytes for entries in self._files.values() for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": names}
        (self.folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")

    def close(self) -> None:
        """Let go of a file that is not finished."""
        if self._handle is not None:
            self._handle.close()

    def _open(self) -> None:
        name = list(self._files)[len(self.files)]
        self._left = list(self._files[name])
        self._handle = (self.folder / name).open("wb")
        self._digest = hashlib.sha256()
        self._write(_header(self._left))

    def _write(self, data: bytes | memoryview) -> None:
        assert self._handle is not None
        self._handle.write(data)
        self._digest.update(data)

    def _close(self) -> None:
        assert self._handle is not None
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self.files[Path(self._handle.name).name] = FileRecord(self._handle.tell(), self._digest.hexdigest())
        self._handle.close()
        self._handle = None


def pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, a few at a time."""
    data = as_bytes(tensor).numpy().data
    for first in range(0, len(data), PIECE):
        yield data[first : first + PIECE]


def tensor_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    digest = hashlib.sha256()
    for piece in pieces(tensor):
        digest.update(piece)
    return digest.hexdigest()


def _plan_files(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    files: list[list[Entry]] = [[]]
    for entry in entries:
        if files[-1] and sum(one.bytes for one in files[-1]) + entry.bytes > FILE_BYTES:
            files.append([])
        files[-1].append(entry)
    if len(files) == 1:
        return {SINGLE_FILE: files[0]}
    return {f"model-{number:05d}-of-{len(files):05d}.safetensors": one for number, one in enumerate(files, 1)}


def _header(entries: Sequence[Entry]) -> bytes:
    """The beginning of a file: the length of the header, and the header, padded to whole 8 bytes."""
    values: dict[str, object] = {"__metadata__": {"format": "pt"}}
    first = 0
    for entry in entries:
        offsets = [first, first + entry.bytes]
        values[entry.key] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": offsets}
        first += entry.bytes
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
