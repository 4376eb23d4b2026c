"""Files that are whole or not there: written beside their place, brought to the disk, renamed."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

from bladellm_runtime.errors import UserError

TEMPORARY = ".tmp"


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` of writing `path` into a `UserError` that says what to do."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "free some space, then go on with --resume"
        else:
            advice = "give --output_dir a folder that can be written"
        raise UserError(f"{path} cannot be written: {reason}; {advice}") from error


def write_file(path: Path, data: bytes) -> None:
    """Write a file so that a reader, even after a power cut, sees the old one or all of the new one."""
    temporary = path.with_name(path.name + TEMPORARY)
    with write_errors(path):
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """`write_file` of a safetensors file; tensors on the CPU. The same tensors always give the same bytes."""
    write_file(path, tensor_bytes(tensors))


def tensor_bytes(tensors: dict[str, torch.Tensor]) -> bytes:
    """A safetensors file of tensors on the CPU, marked as PyTorch's, as transformers asks."""
    # Copies, because views of one tensor (rows of fused layers) are refused.
    whole = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    data: bytes = safetensors.torch.save(whole, {"format": "pt"})
    return data


def digest(data: bytes) -> str:
    """SHA-256, hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str | None:
    """`digest` of a file, None where there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
