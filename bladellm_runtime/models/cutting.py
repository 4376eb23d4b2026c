"""What a checkpoint must tell before it can be cut: its layout, its shape, and how its layers are packed."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from math import lcm

import torch

from bladellm_runtime.distributed.cuts import INDICES, LinearCut, Packing, groups_of
from bladellm_runtime.distributed.layouts import Rule, find_layout, read_shape
from bladellm_runtime.distributed.plan import ModelShape, fitting_unit
from bladellm_runtime.distributed.table import Model, Shapes, find_prefix, quantized_modules, rule_of
from bladellm_runtime.fields import Fields
from bladellm_runtime.models.checkpoint import Checkpoint
from bladellm_runtime.quantization.format import CheckpointFormat
from bladellm_runtime.quantization.registry import read_quantization
from bladellm_runtime.quantization.regroup import regrouped
from bladellm_runtime.quantization.weight import QuantizedWeight


def describe(checkpoint: Checkpoint, config: Fields, degree: int) -> Model:
    """The checkpoint of a whole model, for a tensor-parallel degree. Raises `CheckpointError` naming file and field."""
    layout = find_layout(config)
    shapes = {key: tuple(checkpoint.view(key).get_shape()) for key in checkpoint.files}
    find_prefix(layout, shapes)
    head = f"{layout.head}."
    tied = config.boolean("tie_word_embeddings", default=False) or not any(key.startswith(head) for key in shapes)
    model = Model(layout, read_shape(layout, config), shapes, tied, {})
    packings = find_packings(config, shapes, ())
    scattered = [name for name, stored in packings.items() if _is_scattered(checkpoint, name, stored.scheme.group_size)]
    packings = find_packings(config, shapes, scattered)
    ruled = ((rule_of(model, module), stored) for module, stored in packings.items())
    unit = _mlp_unit(model.shape, ((rule, stored) for rule, stored in ruled if rule is not None), degree)
    shape = dataclasses.replace(model.shape, mlp_unit=unit)
    return dataclasses.replace(model, shape=shape, packings=packings)


def describe_shape(config: Fields, degree: int) -> ModelShape:
    """The shape of a model of which there is only the config.json, as `describe` finds it with the weights.

    Raises `CheckpointError` naming file and field.
    """
    layout = find_layout(config)
    shape = read_shape(layout, config)
    if not config.has("quantization_config"):
        return dataclasses.replace(shape, mlp_unit=fitting_unit(shape.intermediate_size, degree, 1, 1))
    form = read_quantization(config.nested("quantization_config"))
    stored = []
    for rule in layout.rules:
        scheme = form.scheme_of(f"{layout.prefixes[0]}{layout.layers}.0.{rule.module}", ())
        if scheme is not None:
            stored.append((rule, Packing(form.name, scheme)))
    return dataclasses.replace(shape, mlp_unit=_mlp_unit(shape, stored, degree))


def unpack_share(
    form: CheckpointFormat,
    packing: Packing,
    cut: LinearCut,
    shape: tuple[int, int],
    tensors: Mapping[str, torch.Tensor],
) -> QuantizedWeight:
    """A rank's share of a quantized layer from its stored tensors, by suffix.

    shape: outputs and inputs of the share, which is not empty. One that does not hold whole groups in
    order gets smaller ones.
    """
    index = next((tensors[name] for name in INDICES if name in tensors), None)
    if not cut.rows and packing.scattered and index is not None:
        groups = index.long()
    else:
        cut_groups = groups_of(cut, packing)
        if cut_groups is None:
            return form.unpack(packing.scheme, *shape, tensors)
        groups = torch.tensor(cut_groups, device=next(iter(tensors.values())).device)
    stored = {name: tensor for name, tensor in tensors.items() if name not in INDICES}
    return regrouped(form.unpack(packing.scheme, *shape, stored), groups)


def find_packings(config: Fields, shapes: Shapes, scattered: Collection[str]) -> dict[str, Packing]:
    """How every quantized layer is stored; `scattered` are those whose g_idx is not in order."""
    modules = quantized_modules(shapes)
    if not modules or not config.has("quantization_config"):
        return {}
    form = read_quantization(config.nested("quantization_config"))
    schemes = {module: form.scheme_of(module, shapes.keys()) for module in modules}
    return {
        module: Packing(form.name, scheme, module in scattered)
        for module, scheme in schemes.items()
        if scheme is not None
    }


def _is_scattered(checkpoint: Checkpoint, module: str, group_size: int | None) -> bool:
    key = next((f"{module}.{name}" for name in INDICES if f"{module}.{name}" in checkpoint.files), None)
    if key is None or group_size is None:
        return False
    index = checkpoint.read(key)
    natural = torch.arange(len(index), dtype=index.dtype) // group_size
    return not (bool((index == -1).all()) or torch.equal(index, natural))


def _mlp_unit(shape: ModelShape, layers: Iterable[tuple[Rule, Packing]], degree: int) -> int:
    """What the inner channels of the MLP are cut into; the same for all layers."""
    group = packing = 1
    for rule, stored in layers:
        if "mlp" in rule.axes:
            packing = lcm(packing, 8 if stored.method == "awq" else 32 // stored.scheme.bits)
            if rule.dimension == "inputs" and not stored.scattered:
                group = lcm(group, stored.scheme.group_size or 1)
    return fitting_unit(shape.intermediate_size, degree, group, packing)
