"""From a model folder to one folder a rank: every tensor is read once, and its shares are written at once."""

import dataclasses
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bladellm_runtime.distributed.cuts import TensorCut
from bladellm_runtime.distributed.manifest import (
    MANIFEST_FILE,
    Manifest,
    RankRecord,
    TensorRecord,
    encode_manifest,
    is_split,
    rank_folder,
    share_of,
)
from bladellm_runtime.distributed.plan import ParallelPlan, shard
from bladellm_runtime.distributed.shares import take_share
from bladellm_runtime.distributed.table import Model, rank_cuts, stages_of
from bladellm_runtime.errors import CheckpointError, ConfigError, UserError
from bladellm_runtime.fields import Fields
from bladellm_runtime.models.checkpoint import Checkpoint, open_checkpoint
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.cutting import describe
from bladellm_runtime.models.folder import file_in, read_json
from bladellm_runtime.models.ranges import DTYPES
from bladellm_runtime.models.registry import FAMILIES
from bladellm_runtime.models.weights import weight_table
from bladellm_tools.output_folder import check_new_folder, partial_folder
from bladellm_tools.quantize.pipeline.files import sync_folder
from bladellm_tools.quantize.pipeline.publish import small_files
from bladellm_tools.split.writer import Entry, ShareWriter, tensor_digest

ADVICE = "free some space or give another --output_dir"
Place = tuple[int, int]
"""A stage and a tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class Split:
    """What came of it. Bytes are those of the safetensors; `largest` those of the rank that has most."""

    output: Path
    plan: ParallelPlan
    model: Model
    bytes_before: int
    bytes_after: int
    largest: int


@dataclass(frozen=True, slots=True)
class _Source:
    """A model to be split: open, described, and planned. `cuts`: by place, and then by key."""

    folder: Path
    checkpoint: Checkpoint
    model: Model
    plan: ParallelPlan
    cuts: dict[Place, dict[str, TensorCut]]

    @property
    def keys(self) -> list[str]:
        """Every tensor, those with the largest numbers first, so that all lie aligned in the files."""
        return sorted(self.checkpoint.files, key=lambda key: -DTYPES[self.dtype(key)].itemsize)

    def dtype(self, key: str) -> str:
        name: str = self.checkpoint.view(key).get_dtype()
        return name

    def entries(self, place: Place) -> list[Entry]:
        """The tensors of a rank."""
        cuts, shapes = self.cuts[place], self.model.shapes
        return [Entry(key, self.dtype(key), cuts[key].shape(shapes[key])) for key in self.keys if key in cuts]


def split_model(folder: Path, output: Path, degrees: tuple[int, int]) -> Split:
    """Split a model folder into `output`, which appears at the end, whole. degrees: tensor and pipeline parallel.

    Raises `UserError` for a model that cannot be split, and an output that is not empty or cannot be written.
    """
    check_output(output, folder)
    output = output.resolve()  # a folder cannot take the place of a link to one
    if is_split(folder):
        raise ConfigError(f"--model {folder} is split already; give the folder it was split from")
    with open_checkpoint(folder) as checkpoint:
        source = _plan(folder, checkpoint, degrees)
        _check_space(output, source)
        with _staging(output) as root:
            files = _write_ranks(root, source)
            size = [sum(file.bytes for file in record.files.values()) for record in files[0]]
            manifest = _manifest(source, *files)
            _copy_small_files(folder, root)
            (root / MANIFEST_FILE).write_bytes(encode_manifest(manifest))
        before = sum(path.stat().st_size for path in checkpoint.paths)
        return Split(output, source.plan, source.model, before, sum(size), max(size))


def check_output(output: Path, model: Path) -> None:
    """Raise `ConfigError`, before any work, where the ranks have no place to go."""
    check_new_folder(output, model)
    partial = partial_folder(output.resolve())
    if partial.exists():
        raise ConfigError(f"{partial} is there, of a run that was killed or goes on; delete it first")


def _plan(folder: Path, checkpoint: Checkpoint, degrees: tuple[int, int]) -> _Source:
    path = file_in(folder, "config.json")
    config = Fields(path, read_json(path))
    for key, file in checkpoint.files.items():
        if checkpoint.view(key).get_dtype() not in DTYPES:
            raise CheckpointError(f"{file}: {key} is of type {checkpoint.view(key).get_dtype()}, which is not known")
    model = describe(checkpoint, config, degrees[0])
    architectures = config.values.get("architectures") or [None]
    if architectures[0] in [family.architecture for family in FAMILIES]:
        spec = read_model_spec(folder)
        checkpoint.check(weight_table(spec), spec)
    plan = shard(model.shape, *degrees)
    places = [(stage, rank) for stage in range(degrees[1]) for rank in range(degrees[0])]
    return _Source(folder, checkpoint, model, plan, {place: rank_cuts(model, plan, *place) for place in places})


def _check_space(output: Path, source: _Source) -> None:
    needed = sum(entry.bytes for place in source.cuts for entry in source.entries(place))
    parent = next(folder for folder in output.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise UserError(
            f"{output}: the ranks take {needed / 2**30:.2f} GiB and the disk has {free / 2**30:.2f} GiB free; {ADVICE}"
        )


@contextmanager
def _staging(output: Path) -> Iterator[Path]:
    """A folder that becomes the output once everything is in it, and is removed where that fails."""
    root = partial_folder(output)
    try:
        root.mkdir(parents=True)
        yield root
        root.rename(output)
        sync_folder(output.parent)
    except BaseException as error:
        shutil.rmtree(root, ignore_errors=True)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise UserError(
                f"{output} cannot be written: {reason}; free some space or give another --output_dir"
            ) from error
        raise


def _write_ranks(root: Path, source: _Source) -> tuple[list[RankRecord], dict[str, str]]:
    """Write the folders; returns their files, and the digests of the whole tensors."""
    writers = {place: ShareWriter(root / rank_folder(*place), source.entries(place)) for place in source.cuts}
    digests = {}
    try:
        for key in source.keys:
            digests[key] = _write_tensor(key, source, writers)
        for writer in writers.values():
            writer.finish()
    finally:
        for writer in writers.values():
            writer.close()
    for writer in writers.values():
        _copy_small_files(source.folder, writer.folder)
    return [RankRecord(*place, writer.files) for place, writer in writers.items()], digests


def _copy_small_files(model: Path, folder: Path) -> None:
    """config.json, the tokenizer and the like, as they are."""
    for path in (file_in(model, "config.json"), *small_files(model)):
        (folder / path.name).write_bytes(path.read_bytes())


def _write_tensor(key: str, source: _Source, writers: dict[Place, ShareWriter]) -> str:
    """Write the shares of one tensor, the only one in memory; returns its digest."""
    tensor = source.checkpoint.read(key)
    for place, writer in writers.items():
        cut = source.cuts[place].get(key)
        if cut is not None:
            writer.put(key, take_share(tensor, cut))
    return tensor_digest(tensor)


def _manifest(source: _Source, ranks: list[RankRecord], digests: dict[str, str]) -> Manifest:
    model, plan = source.model, source.plan
    tensors = {}
    for key, shape in model.shapes.items():
        stages = tuple(stages_of(model, plan, key))
        cuts = [source.cuts[stages[0], rank].get(key) for rank in range(plan.tensor_parallel_size)]
        dim = next(cut.dim for cut in cuts if cut is not None)
        shares = tuple(map(share_of, cuts))
        tensors[key] = TensorRecord(source.dtype(key), shape, digests[key], stages, dim, shares)
    return Manifest(
        layout=model.layout.name,
        tensor_parallel_size=plan.tensor_parallel_size,
        pipeline_parallel_size=plan.pipeline_parallel_size,
        shape=dataclasses.asdict(model.shape),
        tied=model.tied,
        scattered=tuple(name for name, packing in model.packings.items() if packing.scattered),
        config_sha256=hashlib.sha256(file_in(source.folder, "config.json").read_bytes()).hexdigest(),
        tensors=tensors,
        ranks=tuple(ranks),
    )
