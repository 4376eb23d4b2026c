"""The cut table: the share of every tensor of a checkpoint that a rank of a stage holds."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from bladellm_runtime.distributed.cuts import WHOLE, LinearCut, Packing, TensorCut, cut_stored
from bladellm_runtime.distributed.layouts import Layout, Rule, axis_range, axis_size
from bladellm_runtime.distributed.plan import ModelShape, ParallelPlan, RankCut
from bladellm_runtime.errors import CheckpointError

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of every tensor of a checkpoint, by key."""
QUANTIZED = ("qweight", "weight_packed", "weight_scale")
"""Suffixes of which a quantized layer has at least one."""
BIASES = ("bias",)


@dataclass(frozen=True)
class Model:
    """A checkpoint to cut. `tied`: the head is the embedding. `packings`: how quantized layers are stored, by name."""

    layout: Layout
    shape: ModelShape
    shapes: Shapes
    tied: bool
    packings: Mapping[str, Packing]

    @cached_property
    def prefix(self) -> str:
        """What the keys of this checkpoint begin with, of those the layout knows."""
        return find_prefix(self.layout, self.shapes)

    def layer_of(self, key: str) -> int | None:
        """The decoder layer of a tensor, None for one outside of them."""
        found = re.match(rf"{re.escape(self.prefix + self.layout.layers)}\.(\d+)\.", key)
        return None if found is None else int(found[1])


def find_prefix(layout: Layout, keys: Mapping[str, object]) -> str:
    """The prefix under which the embedding is found. Raises `CheckpointError` where it is not."""
    for prefix in layout.prefixes:
        if f"{prefix}{layout.embedding}.weight" in keys:
            return prefix
    raise CheckpointError(f"{layout.prefixes[0]}{layout.embedding}.weight is missing; give a model that has it")


def quantized_modules(shapes: Shapes) -> list[str]:
    """The layers that are stored in more than a weight."""
    found = (key.rpartition(".") for key in shapes)
    return list(dict.fromkeys(module for module, _, suffix in found if suffix in QUANTIZED))


def linear_cut(rule: Rule, shape: ModelShape, rank: RankCut) -> LinearCut:
    """A rank's share of a layer that a rule cuts."""
    ranges, size = [], 0
    for axis in rule.axes:
        own = axis_range(axis, shape, rank)
        ranges.append(range(size + own.start, size + own.stop))
        size += axis_size(axis, shape)
    return LinearCut(rule.dimension == "outputs", tuple(ranges), size)


def rule_of(model: Model, module: str) -> Rule | None:
    """What cuts a module, None where it is held whole."""
    layout, prefix = model.layout, model.prefix
    if module in (prefix + layout.embedding, layout.head):
        return Rule(module, "outputs", ("vocab",))
    if model.layer_of(f"{module}.") is None:
        return None
    return next((rule for rule in layout.rules if module.endswith(f".{rule.module}")), None)


def stages_of(model: Model, plan: ParallelPlan, key: str) -> list[int]:
    """The pipeline stages that hold a tensor. Raises `CheckpointError` for a layer the model does not have."""
    layer, layout, prefix = model.layer_of(key), model.layout, model.prefix
    every = list(range(len(plan.stages)))
    if layer is not None:
        found = [stage for stage in every if layer in plan.stages[stage]]
        if not found:
            raise CheckpointError(f"{key} is of a layer beyond the {model.shape.layers} of config.json")
        return found
    module = key.rpartition(".")[0]
    if module == prefix + layout.embedding:
        return sorted({0, every[-1]}) if model.tied else [0]
    if module in [prefix + name for name in layout.first]:
        return [0]
    return [every[-1]] if module in (layout.head, *(prefix + name for name in layout.last)) else every


def rank_cuts(model: Model, plan: ParallelPlan, stage: int, rank: int) -> dict[str, TensorCut]:
    """The share of every tensor that a rank of a stage holds; a tensor it has nothing of is left out.

    Raises `CheckpointError` naming the tensor where one is missing, of another shape, or nothing the layout knows.
    """
    check_whole(model)
    cut_of = _tensor_cut(model, plan.ranks[rank])
    held = (key for key in model.shapes if stage in stages_of(model, plan, key))
    cuts = {key: cut_of(key) for key in held}
    return {key: cut for key, cut in cuts.items() if rank == 0 or not _on_first_rank(model, key)}


def check_whole(model: Model) -> None:
    """Raise `CheckpointError` where a layer that must be cut is missing, or a matrix is there that no rule knows."""
    modules = {key.rpartition(".")[0] for key in model.shapes}
    for layer in range(model.shape.layers):
        for rule in model.layout.rules:
            module = f"{model.prefix}{model.layout.layers}.{layer}.{rule.module}"
            if module not in modules:
                raise CheckpointError(f"{module} is missing; download the model folder again")
    for key, shape in model.shapes.items():
        module = key.rpartition(".")[0]
        if len(shape) > 1 and model.layer_of(key) is not None and rule_of(model, module) is None:
            raise CheckpointError(f"{key} is not part of the {model.layout.name} layout; the model cannot be split")


def _on_first_rank(model: Model, key: str) -> bool:
    """Whether it is the bias of a layer whose products the ranks add up."""
    module, _, suffix = key.rpartition(".")
    rule = rule_of(model, module)
    return rule is not None and rule.dimension == "inputs" and suffix in BIASES


def _tensor_cut(model: Model, rank: RankCut) -> Callable[[str], TensorCut]:
    def cut(key: str) -> TensorCut:
        module, _, suffix = key.rpartition(".")
        rule = rule_of(model, module)
        if rule is None:
            return WHOLE
        own = linear_cut(rule, model.shape, rank)
        return cut_stored(module, suffix, model.shapes[key], own, model.packings.get(module))

    return cut
