"""The proof of a split folder: its ranks are put together, tensor by tensor, and are the source byte for byte."""

from dataclasses import dataclass
from pathlib import Path

from bladellm_runtime.distributed.manifest import MANIFEST_FILE, is_split, rank_folder
from bladellm_runtime.distributed.shares import same_bytes
from bladellm_runtime.errors import CheckpointError, ConfigError
from bladellm_runtime.models.checkpoint import Checkpoint, open_checkpoint
from bladellm_runtime.models.folder import file_in
from bladellm_runtime.models.split_folder import MergedCheckpoint, open_merged
from bladellm_tools.quantize.pipeline.files import file_digest
from bladellm_tools.quantize.pipeline.publish import small_files
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
        files = _compare_files(folder, merged)
        _compare_copies(folder, merged)
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


def _compare_files(folder: Path, merged: MergedCheckpoint) -> int:
    """Compare every safetensors file with its digest; returns how many there are."""
    count = 0
    for owner, rank in zip(merged.manifest.ranks, merged.ranks, strict=True):
        home = folder / rank_folder(owner.stage, owner.rank)
        if {path.name for path in rank.paths} != set(owner.files):
            raise CheckpointError(f"{merged.index} names other files than there are in {home}; split the model again")
        for path in rank.paths:
            if file_digest(path) != owner.files[path.name].sha256:
                raise CheckpointError(f"{path} is not as it was written; split the model again")
            count += 1
    return count


def _compare_copies(folder: Path, merged: MergedCheckpoint) -> None:
    """Compare config.json, the tokenizer and the like, of which every rank has a copy, with those of the folder."""
    homes = [folder / rank_folder(owner.stage, owner.rank) for owner in merged.manifest.ranks]
    names = {"config.json", *(path.name for home in homes for path in small_files(home))}
    for name in sorted(names):
        digest = file_digest(file_in(folder, name))
        for home in homes:
            if file_digest(file_in(home, name)) != digest:
                raise CheckpointError(f"{home / name} and {folder / name} differ; split the model again")
