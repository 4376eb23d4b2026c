"""A checkpoint as one rank sees it: its share of every tensor, cut as it is read."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError

from bladellm_runtime.distributed.cuts import LinearCut, Packing, TensorCut
from bladellm_runtime.distributed.plan import ParallelPlan, shard
from bladellm_runtime.distributed.shares import read_share
from bladellm_runtime.distributed.table import Model, linear_cut, rank_cuts, rule_of
from bladellm_runtime.errors import CheckpointError
from bladellm_runtime.fields import Fields
from bladellm_runtime.models.checkpoint import Checkpoint
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.cutting import describe
from bladellm_runtime.models.quantized import Schemes, expected_tensors, find_schemes
from bladellm_runtime.models.ranges import FileRange
from bladellm_runtime.models.weights import WeightTable


class RankCheckpoint:
    """The tensors of a rank. `files` gives the file of each key it has a share of; `cuts` the shares.

    checkpoint: of the whole model, or of the rank's share of it where `is_share`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        model: Model,
        plan: ParallelPlan,
        stage: int,
        rank: int,
        *,
        is_share: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._is_share = is_share
        self.model = model
        self.plan = plan
        self.stage = stage
        self.rank = rank
        self.cuts: dict[str, TensorCut] = rank_cuts(model, plan, stage, rank)
        self.files: dict[str, Path] = {key: checkpoint.files[key] for key in self.cuts if key in checkpoint.files}
        self.index = checkpoint.index

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint itself."""
        return self._checkpoint

    def check(self, table: WeightTable, spec: ModelSpec) -> Schemes:
        """The schemes of the whole model's quantized layers.

        Raises `CheckpointError` unless the tensors were those of the whole model's table before they were cut.
        """
        where = self.index or next(iter(self._checkpoint.files.values()))
        schemes = find_schemes(spec, table, self.model.shapes.keys(), where)
        for key, one in expected_tensors(spec, table, schemes, where).items():
            shape = self.model.shapes.get(key)
            if shape is None and one.required:
                raise CheckpointError(f"{where}: {key} is missing; run blade_llm_split again")
            if shape not in (None, one.shape):
                asked = f"config.json's {one.fields} ask for {list(one.shape)}"
                raise CheckpointError(f"{where}: {key} was of shape {list(shape or ())} when it was cut, but {asked}")
        return schemes

    def check_shares(self, dtypes: Mapping[str, str]) -> None:
        """Raise `CheckpointError` unless the checkpoint of a rank's share holds just that, of these types by key."""
        again = "run blade_llm_split again"
        where = self.index or next(iter(self._checkpoint.files.values()))
        if missing := self.cuts.keys() - self._checkpoint.files.keys():
            raise CheckpointError(f"{where}: {min(missing)} is missing; {again}")
        if extra := self._checkpoint.files.keys() - self.cuts.keys():
            raise CheckpointError(f"{self._checkpoint.files[min(extra)]}: {min(extra)} is not of this rank; {again}")
        for key, file in self.files.items():
            view = self._checkpoint.view(key)
            shape, dtype = tuple(view.get_shape()), view.get_dtype()
            if shape != self.shape(key):
                raise CheckpointError(f"{file}: {key} has shape {list(shape)}, not {list(self.shape(key))}; {again}")
            if dtype != dtypes[key]:
                raise CheckpointError(f"{file}: {key} is of type {dtype}, not {dtypes[key]:.60}; {again}")

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a share."""
        return self.cuts[key].shape(self.model.shapes[key])

    def read(self, key: str) -> torch.Tensor:
        """One share; reads no more of the file. Raises `CheckpointError`."""
        if self._is_share:
            return self._checkpoint.read(key)
        try:
            return read_share(self._checkpoint.view(key), self.cuts[key])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self.files[key]}: {key} cannot be read: {error}") from error

    def locate(self, key: str) -> list[FileRange] | None:
        """Where a share lies in its file, piece after piece; None where it must be read, since it is not some rows of
        the tensor as they are."""
        cut, whole = self.cuts[key], self._checkpoint.locate(key)
        if self._is_share:
            return [whole]
        if cut.rewrite is not None or cut.rebase or cut.dim not in (None, 0):
            return None
        if cut.dim is None:
            return [whole]
        row = whole.size // whole.shape[0] if whole.shape[0] else 0
        return [
            FileRange(
                key,
                whole.file,
                whole.start + part.start * row,
                len(part) * row,
                (len(part), *whole.shape[1:]),
                whole.dtype,
            )
            for part in cut.ranges
        ]

    def linear(self, module: str) -> LinearCut | None:
        """The rank's share of a linear layer; None for one that is held whole."""
        rule = rule_of(self.model, module)
        return None if rule is None else linear_cut(rule, self.model.shape, self.plan.ranks[self.rank])

    def packing(self, module: str) -> Packing | None:
        """How a quantized layer is stored; None for a plain one."""
        return self.model.packings.get(module)


def cut_checkpoint(
    checkpoint: Checkpoint, config: Fields, degrees: tuple[int, int], stage: int, rank: int
) -> RankCheckpoint:
    """The share of a rank of a whole checkpoint. degrees: tensor parallel and pipeline parallel. Raises `UserError`."""
    model = describe(checkpoint, config, degrees[0])
    return RankCheckpoint(checkpoint, model, shard(model.shape, *degrees), stage, rank)
