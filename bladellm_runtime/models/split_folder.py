"""A folder that `blade_llm_split` has made: opened as one rank, or put together as the whole model."""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from bladellm_runtime.distributed.layouts import find_layout, read_shape
from bladellm_runtime.distributed.manifest import MANIFEST_FILE, Manifest, rank_folder, read_manifest
from bladellm_runtime.distributed.shares import Merge
from bladellm_runtime.distributed.table import Model
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.fields import Fields
from bladellm_runtime.models.checkpoint import Checkpoint, open_checkpoint
from bladellm_runtime.models.cutting import find_packings
from bladellm_runtime.models.folder import file_in, read_json
from bladellm_runtime.models.ranges import DTYPES
from bladellm_runtime.models.rank_checkpoint import RankCheckpoint

AGAIN = "run blade_llm_split again"


class MergedCheckpoint(Checkpoint):
    """The whole model, put together tensor by tensor from the checkpoints of all ranks, stage by stage."""

    def __init__(self, folder: Path, manifest: Manifest, ranks: Sequence[Checkpoint]) -> None:
        files = {key: _holder(folder, manifest, ranks, key).files[key] for key in manifest.tensors}
        super().__init__({}, files, folder / MANIFEST_FILE)
        self.folder = folder
        self.manifest = manifest
        self.ranks = ranks

    @property
    def paths(self) -> list[Path]:
        return sorted({path for rank in self.ranks for path in rank.paths})

    def view(self, key: str) -> Any:
        return _View(self, key)

    def read(self, key: str) -> torch.Tensor:
        """One whole tensor. Raises `CheckpointError` where the shares do not make one."""
        record = self.manifest.tensors[key]
        merge = Merge(record.shape, DTYPES[record.dtype])
        for checkpoint, owner in zip(self.ranks, self.manifest.ranks, strict=True):
            cut = record.cut(owner.rank)
            if cut is None or owner.stage not in record.stages:
                continue
            if key not in checkpoint.files:
                where = self.folder / rank_folder(owner.stage, owner.rank)
                raise CheckpointError(f"{where}: {key} is missing; {AGAIN}")
            if not merge.add(checkpoint.read(key), cut):
                raise CheckpointError(f"{checkpoint.files[key]}: {key} is not the share that {MANIFEST_FILE} says")
        if not merge.is_complete():
            raise CheckpointError(f"{self.index}: {key} is not whole on the ranks together; {AGAIN}")
        return merge.whole


class _View:
    """What `safe_open` gives for a tensor, of a merged one: its type and shape, and the tensor for a slice."""

    def __init__(self, checkpoint: MergedCheckpoint, key: str) -> None:
        self._checkpoint = checkpoint
        self._key = key

    def get_shape(self) -> list[int]:
        return list(self._checkpoint.manifest.tensors[self._key].shape)

    def get_dtype(self) -> str:
        return self._checkpoint.manifest.tensors[self._key].dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._checkpoint.read(self._key)[index]


@contextmanager
def open_merged(folder: Path) -> Iterator[MergedCheckpoint]:
    """Open all ranks of a split folder as the whole model. Raises `CheckpointError`, as each of them would."""
    manifest = read_manifest(folder)
    check_config(folder, manifest)
    model = _model(folder, manifest)
    with ExitStack() as stack:
        folders = [folder / rank_folder(owner.stage, owner.rank) for owner in manifest.ranks]
        ranks = [stack.enter_context(open_checkpoint(path)) for path in folders]
        for owner, checkpoint in zip(manifest.ranks, ranks, strict=True):
            _share(folder, manifest, model, checkpoint, (owner.stage, owner.rank))
        yield MergedCheckpoint(folder, manifest, ranks)


@contextmanager
def open_rank(folder: Path, stage: int, rank: int) -> Iterator[RankCheckpoint]:
    """Open one rank of a split folder; no file of another one is touched.

    Raises `CheckpointError` for a rank there is not, and where its tensors are not those of the manifest.
    """
    manifest = read_manifest(folder)
    check_config(folder, manifest)
    model = _model(folder, manifest)
    if (stage, rank) not in [(owner.stage, owner.rank) for owner in manifest.ranks]:
        raise CheckpointError(
            f"{folder} is split for --tensor_parallel_size {manifest.tensor_parallel_size} --pipeline_parallel_size "
            f"{manifest.pipeline_parallel_size}; use these"
        )
    with open_checkpoint(folder / rank_folder(stage, rank)) as checkpoint:
        yield _share(folder, manifest, model, checkpoint, (stage, rank))


@contextmanager
def open_whole(folder: Path) -> Iterator[Checkpoint]:
    """Open a model folder as the whole model, whether or not it is split."""
    opened = open_merged if (folder / MANIFEST_FILE).is_file() else open_checkpoint
    with opened(folder) as checkpoint:
        yield checkpoint


def check_config(folder: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` where config.json is not the one the model was split with, or the manifest not of it."""
    path = file_in(folder, "config.json")
    if hashlib.sha256(path.read_bytes()).hexdigest() != manifest.config_sha256:
        raise CheckpointError(f"{path} is not as blade_llm_split wrote it; restore it, or split the model again")
    config = Fields(path, read_json(path))
    layout, unit = find_layout(config), manifest.shape["mlp_unit"]
    shape = dataclasses.asdict(read_shape(layout, config, unit))
    if layout.name != manifest.layout or shape != manifest.shape or unit < 1 or shape["intermediate_size"] % unit:
        raise CheckpointError(f"{folder / MANIFEST_FILE} is of another model than {path.name}; {AGAIN}")


def _share(
    folder: Path, manifest: Manifest, model: Model, checkpoint: Checkpoint, place: tuple[int, int]
) -> RankCheckpoint:
    """A rank's checkpoint. place: stage and rank. Raises `CheckpointError` unless it holds what the plan gives it."""
    stage, rank = place
    own = RankCheckpoint(checkpoint, model, manifest.plan, stage, rank, is_share=True)
    records = {key: record.cut(rank) for key, record in manifest.tensors.items() if stage in record.stages}
    if own.cuts != {key: cut for key, cut in records.items() if cut is not None}:
        raise CheckpointError(f"{folder / MANIFEST_FILE} was cut by another plan; {AGAIN}")
    own.check_shares({key: record.dtype for key, record in manifest.tensors.items()})
    return own


def _model(folder: Path, manifest: Manifest) -> Model:
    path = file_in(folder, "config.json")
    shapes = {key: record.shape for key, record in manifest.tensors.items()}
    packings = find_packings(Fields(path, read_json(path)), shapes, manifest.scattered)
    return Model(manifest.model_layout, manifest.model_shape, shapes, manifest.tied, packings)


def _holder(folder: Path, manifest: Manifest, ranks: Sequence[Checkpoint], key: str) -> Checkpoint:
    """The first rank's checkpoint that has a share of a tensor."""
    for checkpoint in ranks:
        if key in checkpoint.files:
            return checkpoint
    stage = manifest.tensors[key].stages[0]
    raise CheckpointError(f"{folder / rank_folder(stage, 0)}: {key} is missing; {AGAIN}")
