"""The proof of a split folder: its ranks are put together, tensor by tensor, and are the source byte for byte."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from bladellm_runtime.distributed.manifest import MANIFEST_FILE, Manifest, is_split, rank_folder
from bladellm_runtime.distributed.shares import same_bytes
from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.models.checkpoint import Checkpoint, open_checkpoint
from bladellm_runtime.models.split_folder import MergedCheckpoint, open_merged
from bladellm_tools.split.writer import tensor_digest


@dataclass(frozen=True, slots=True)
class Proof:
    """What was compared. `bytes`: of the whole tensors."""

    tensors: int
    bytes: int
    ranks: int
    files: int


def verify(folder: Path, model: Path | None) -> Proof:
    """Compare a split folder with the model it was split from, or with the digests of its tensors taken then.

    Raises `UserError` naming the first tensor or file that differs.
    """
    if not is_split(folder):
        raise ConfigError(f"--verify {folder} holds no {MANIFEST_FILE}; give a folder that blade_llm_split made")
    with open_merged(folder) as merged:
        if model is None:
            size = _compare_digests(merged)
        else:
            with open_checkpoint(model) as source:
                size = _compare(merged, source, model)
        files = _compare_files(folder, merged.manifest)
        return Proof(len(merged.manifest.tensors), size, len(merged.manifest.ranks), files)


def _compare(merged: MergedCheckpoint, source: Checkpoint, model: Path) -> int:
    size = 0
    for key in source.files:
        if key not in merged.files:
            raise CheckpointError(f"{merged.index}: {key} of {model} is missing; split the model again")
    for key in merged.files:
        if key not in source.files:
            raise CheckpointError(f"{merged.index}: {key} is not in {model}; give the --model that was split")
        whole, wanted = merged.read(key), source.read(key)
        if whole.dtype != wanted.dtype or not same_bytes(whole, wanted):
            raise CheckpointError(
                f"{merged.files[key].parent.parent}: {key} differs from {model}; split the model again"
            )
        size += whole.nbytes
    return size


def _compare_digests(merged: MergedCheckpoint) -> int:
    size = 0
    for key, record in merged.manifest.tensors.items():
        whole = merged.read(key)
        if tensor_digest(whole) != record.sha256:
            raise CheckpointError(f"{merged.folder}: {key} differs from the model that was split; split it again")
        size += whole.nbytes
    return size


def _compare_files(folder: Path, manifest: Manifest) -> int:
    """Compare every file with its digest; returns how many there are."""
    count = 0
    for owner in manifest.ranks:
        for name, record in owner.files.items():
            path = folder / rank_folder(owner.stage, owner.rank) / name
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                    raise CheckpointError(f"{path} is not as it was written; split the model again")
            count += 1
    return count
