"""`split_config.json`: what `blade_llm_split` has cut and how, so that ranks can be read, merged and proved."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec

from bladellm_runtime.distributed.cuts import TensorCut
from bladellm_runtime.distributed.layouts import LAYOUTS, Layout
from bladellm_runtime.distributed.plan import ModelShape, ParallelPlan, shard
from bladellm_runtime.errors import CheckpointError

MANIFEST_FILE = "split_config.json"
VERSION = 1
MAX_BYTES = 512 * 2**20
MAX_RANKS = 4096


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `TensorCut` without its dimension, which is the same for all ranks."""

    ranges: tuple[tuple[int, int], ...] = ()
    rebase: int = 0
    rewrite: tuple[int, int, int] | None = None


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of the whole model: `sha256` of its bytes, the `stages` that hold it, and every tensor-parallel rank's
    share along `dim` (None: held whole), None where a rank has none."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    stages: tuple[int, ...]
    dim: int | None
    shares: tuple[Share | None, ...]

    def cut(self, rank: int) -> TensorCut | None:
        """What a tensor-parallel rank holds of it."""
        share = self.shares[rank]
        if share is None:
            return None
        return TensorCut(self.dim, tuple(range(*part) for part in share.ranges), share.rebase, share.rewrite)


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a rank's folder."""

    bytes: int
    sha256: str


class RankRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's folder and the safetensors in it, by name."""

    stage: int
    rank: int
    files: dict[str, FileRecord]


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of split_config.json. `layout`: the name of the `Layout`. `tied`: the head is the embedding.
    `scattered`: layers whose g_idx is not in order. `config_sha256`: of config.json. `tensors`: by key."""

    layout: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    shape: dict[str, int]
    tied: bool
    scattered: tuple[str, ...]
    config_sha256: str
    tensors: dict[str, TensorRecord]
    ranks: tuple[RankRecord, ...]
    version: int = VERSION

    @property
    def model_shape(self) -> ModelShape:
        return ModelShape(**self.shape)

    @property
    def plan(self) -> ParallelPlan:
        """The plan that the model was cut by."""
        return shard(self.model_shape, self.tensor_parallel_size, self.pipeline_parallel_size)

    @property
    def model_layout(self) -> Layout:
        return next(layout for layout in LAYOUTS if layout.name == self.layout)


def share_of(cut: TensorCut | None) -> Share | None:
    """A cut as the manifest holds it."""
    if cut is None:
        return None
    return Share(tuple((part.start, part.stop) for part in cut.ranges), cut.rebase, cut.rewrite)


def rank_folder(stage: int, rank: int) -> str:
    """The name of a rank's folder: `rank-SS-TT`, stage and tensor-parallel rank."""
    return f"rank-{stage:02d}-{rank:02d}"


def is_split(folder: Path) -> bool:
    """Whether `blade_llm_split` has made a model folder."""
    return (folder / MANIFEST_FILE).is_file()


def encode_manifest(manifest: Manifest) -> bytes:
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check split_config.json. Raises `CheckpointError` naming the file."""
    path = folder / MANIFEST_FILE
    again = "run blade_llm_split again"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_BYTES // 2**20} MiB; {again}")
        data = path.read_bytes()
        if msgspec.json.decode(data, type=_Version).version != VERSION:
            raise CheckpointError(f"{path} is of another version than {VERSION}; {again}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}; {again}") from error
    except msgspec.MsgspecError as error:
        raise CheckpointError(f"{path} is not a whole manifest ({error}); {again}") from error
    if problem := _problem(manifest):
        raise CheckpointError(f"{path}: {problem}; {again}")
    return manifest


class _Version(msgspec.Struct):
    version: int = 0


def _problem(manifest: Manifest) -> str | None:
    """What keeps a manifest from being one, None where it is."""
    degree, stages = manifest.tensor_parallel_size, manifest.pipeline_parallel_size
    if not 1 <= degree * stages <= MAX_RANKS:
        return f"{degree} × {stages} are no degrees"
    if manifest.layout not in [layout.name for layout in LAYOUTS]:
        return f"the layout {manifest.layout!r:.60} is not known"
    if set(manifest.shape) != {field.name for field in dataclasses.fields(ModelShape)}:
        return "shape does not have the fields of a model's shape"
    wanted = [(stage, rank) for stage in range(stages) for rank in range(degree)]
    if [(record.stage, record.rank) for record in manifest.ranks] != wanted:
        return "ranks does not list every rank of every stage"
    for key, tensor in manifest.tensors.items():
        if len(tensor.shares) != degree or not set(tensor.stages) <= set(range(stages)) or not tensor.stages:
            return f"{key!r:.100} does not have a share for every rank"
        if not _fits(tensor):
            return f"{key!r:.100} has shares outside of its shape"
    return None


def _fits(tensor: TensorRecord) -> bool:
    if tensor.dim is None:
        return True
    if not 0 <= tensor.dim < len(tensor.shape):
        return False
    parts: list[Any] = [part for share in tensor.shares if share is not None for part in share.ranges]
    return all(0 <= first <= last <= tensor.shape[tensor.dim] for first, last in parts)
