"""Automatic mixed precision: the groups of linear layers that rounding hurts most go back to floating point."""

from collections.abc import Mapping, Sequence

import safetensors.torch

from bladellm_tools.quantize.algorithms.layer import LinearGroup
from bladellm_tools.quantize.job import ModuleReport
from bladellm_tools.quantize.pipeline.output import Staging
from bladellm_tools.quantize.pipeline.parts import without_modules
from bladellm_tools.quantize.pipeline.rounding import heads_of, refold
from bladellm_tools.quantize.pipeline.source import FloatModel, layer_prefix

Choice = dict[int, tuple[LinearGroup, ...]]
"""Groups by decoder layer."""


def choose_fallback(groups: Sequence[Sequence[LinearGroup]], errors: Mapping[str, float], ratio: float) -> Choice:
    """The share `ratio`, rounded, of all groups, those with the largest error; of equal ones the earlier.

    groups: of every decoder layer; errors: by full module name. A group's error is the mean of its members': they read
    the same input and are served as one layer.
    """
    ranked = [
        (-sum(errors[layer_prefix(layer) + member] for member in group.members) / len(group.members), layer, place)
        for layer, row in enumerate(groups)
        for place, group in enumerate(row)
    ]
    chosen = sorted(ranked)[: int(ratio * len(ranked) + 0.5)]
    places = sorted((layer, place) for _, layer, place in chosen)
    return {
        layer: tuple(groups[layer][place] for at, place in places if at == layer)
        for layer in sorted({layer for layer, _ in places})
    }


def fallen_modules(choice: Choice) -> list[str]:
    """Full names of the members of all chosen groups."""
    return [layer_prefix(layer) + member for layer, row in choice.items() for group in row for member in group.members]


def restore(model: FloatModel, staging: Staging, layer: int, groups: Sequence[LinearGroup]) -> None:
    """Write the part of a finished layer again with `groups` in floating point, as its smoothing asks.

    The other groups and the norms were made for the scales folded into the layer, so those are folded once more.
    """
    if staging.is_rewritten(layer):
        return
    weights = model.layer(layer)
    stored = {name: tensor.dtype for name, tensor in weights.items()}
    record = staging.manifest.layers[layer]
    folds = {} if record.folds is None else safetensors.torch.load_file(staging.folds(layer))
    folded = refold(weights, folds, heads_of(model.spec))
    members = [member for group in groups for member in group.members]
    prefix = layer_prefix(layer)
    tensors = without_modules(safetensors.torch.load_file(staging.part(layer)), {prefix + member for member in members})
    for member in members:
        name = f"{member}.weight"
        tensors[prefix + name] = folded[name].to(stored[name])
    staging.rewrite_layer(layer, tensors)


def mark_fallback(reports: Sequence[ModuleReport], modules: Sequence[str]) -> None:
    """Say in the reports of `modules` that they are in floating point after all."""
    fallen = set(modules)
    for report in reports:
        report.fallback = report.module in fallen


def error_table(reports: Sequence[ModuleReport]) -> dict[str, float]:
    """Errors by module, of those that have one."""
    return {report.module: report.error for report in reports if report.error is not None}
