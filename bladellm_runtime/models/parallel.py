"""A rank's model: its spec, and what it holds of every tensor.

All ranks have as many KV heads, and as many query heads to each of them, as the largest one. Where a rank has
fewer, its rows of the q, k and v projections and its columns of the o projection are filled up with zeros.
"""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from bladellm_runtime.distributed.communicator import Communicator
from bladellm_runtime.distributed.manifest import is_split, read_manifest
from bladellm_runtime.distributed.plan import ParallelPlan, RankCut, shard
from bladellm_runtime.errors import ConfigError
from bladellm_runtime.fields import Fields
from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.models.cut import Cut, make_cut
from bladellm_runtime.models.cutting import describe_shape
from bladellm_runtime.models.folder import file_in, read_json
from bladellm_runtime.models.split_folder import check_config
from bladellm_runtime.models.stages import stage_spec, stage_table
from bladellm_runtime.models.weights import Part, WeightTable, weight_table


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The plan of a whole model, and the ranks that hold the same layers; None where this one has no other.

    stage: of the pipeline, whose layers these are.
    """

    plan: ParallelPlan
    communicator: Communicator | None
    stage: int = 0

    @property
    def rank(self) -> int:
        """Among the ranks that hold the same layers."""
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before the stage."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether nothing comes behind it."""
        return self.stage == len(self.plan.stages) - 1

    def spec(self, spec: ModelSpec) -> ModelSpec:
        """What the rank runs of a whole model."""
        own = spec if self.communicator is None else rank_spec(spec, self.plan, self.rank)
        return stage_spec(own, self.plan, self.stage)

    def table(self, spec: ModelSpec) -> WeightTable:
        """What the rank holds of a whole model."""
        own = weight_table(spec) if self.communicator is None else rank_table(spec, self.plan, self.rank)
        return stage_table(own, self.plan, self.stage)


def make_plan(folder: Path, degree: int, stages: int = 1) -> ParallelPlan:
    """The plan of a model for a tensor-parallel degree and a number of pipeline stages; of a split folder the one it
    was cut by. All ranks make the same. Raises `ConfigError` for degrees that the model, or the folder, cannot have.
    """
    if not is_split(folder):
        file = file_in(folder, "config.json")
        return shard(describe_shape(Fields(file, read_json(file)), degree), degree, stages)
    manifest = read_manifest(folder)
    check_config(folder, manifest)
    made = (manifest.tensor_parallel_size, manifest.pipeline_parallel_size)
    if made != (degree, stages):
        raise ConfigError(
            f"{folder} is split for --tensor_parallel_size {made[0]} --pipeline_parallel_size {made[1]}, not {degree} "
            f"and {stages}; use these degrees, or the model that it was split from"
        )
    return manifest.plan


def plan_digest(folder: Path, plan: ParallelPlan) -> str:
    """What must be the same on all ranks: the model's description, and what each of them holds of it."""
    return hashlib.sha256(file_in(folder, "config.json").read_bytes() + repr(plan).encode()).hexdigest()


def rank_spec(spec: ModelSpec, plan: ParallelPlan, rank: int) -> ModelSpec:
    """What a rank runs: the padded number of heads, its part of the MLP; the vocabulary is the whole model's."""
    return replace(
        spec,
        heads=plan.kv_heads * plan.group,
        kv_heads=plan.kv_heads,
        intermediate_size=_mlp_cut(plan, plan.ranks[rank]).size,
    )


def rank_table(spec: ModelSpec, plan: ParallelPlan, rank: int) -> WeightTable:
    """The table of the whole model with what a rank holds of each tensor.

    Biases of row-parallel layers, which are added once, are the first rank's alone.
    """
    cut = plan.ranks[rank]
    queries, keys = _query_cut(plan, cut, spec.head_dim), _key_cut(plan, cut, spec.head_dim)
    mlp, vocab = _mlp_cut(plan, cut), make_cut(cut.vocab, plan.vocab_rows - len(cut.vocab))
    rows = {
        "qkv": (queries, keys, keys),
        "gate_up": (mlp, mlp),
        "embedding": (vocab,),
        "head": (vocab,),
    }
    columns = {"output": queries, "down": mlp}
    table: WeightTable = {}
    for name, parts in weight_table(spec).items():
        module, kind = name.split(".")[-2:]
        if module in rows:
            table[name] = tuple(replace(part, rows=own) for part, own in zip(parts, rows[module], strict=True))
        elif module in columns and kind == "weight":
            table[name] = tuple(replace(part, columns=columns[module]) for part in parts)
        elif module not in columns or rank == 0:
            table[name] = parts
    return table


def share_table(table: WeightTable) -> WeightTable:
    """A rank's table where the checkpoint has only the rank's shares of the tensors."""
    return {name: tuple(_share(part) for part in parts) for name, parts in table.items()}


def _share(part: Part) -> Part:
    if not part.is_cut:
        return part
    rows, columns = part.rows, part.columns
    shape = (part.shape[0] if rows is None else rows.stored, *part.shape[1:])
    if columns is not None:
        shape = (shape[0], columns.stored)
    return replace(
        part,
        shape=shape,
        rows=None if rows is None else rows.of_share(),
        columns=None if columns is None else columns.of_share(),
        whole=part.shape,
    )


def _query_cut(plan: ParallelPlan, cut: RankCut, head_dim: int) -> Cut:
    """Of the query heads, each counted in numbers: those of a KV head, filled up, then those of the next."""
    parts: list[range | int] = []
    for group in cut.heads:
        parts += [_scaled(group.queries, head_dim), (plan.group - len(group.queries)) * head_dim]
    return make_cut(*parts, (plan.kv_heads - len(cut.heads)) * plan.group * head_dim)


def _key_cut(plan: ParallelPlan, cut: RankCut, head_dim: int) -> Cut:
    return make_cut(_scaled(cut.kv_heads, head_dim), (plan.kv_heads - len(cut.heads)) * head_dim)


def _mlp_cut(plan: ParallelPlan, cut: RankCut) -> Cut:
    """A rank without any inner channel has some that are 0: kernels know no layer without outputs."""
    return make_cut(cut.mlp) if cut.mlp else make_cut(min(len(rank.mlp) for rank in plan.ranks if rank.mlp))


def _scaled(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
