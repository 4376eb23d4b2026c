"""One decoder layer: smoothed, rounded, and the error of every linear layer measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from bladellm_runtime.models.config import ModelSpec
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight
from bladellm_tools.quantize.algorithms.algorithm import Algorithm, Rounded
from bladellm_tools.quantize.algorithms.fold import Heads, can_fold, fold
from bladellm_tools.quantize.algorithms.grid import FP8_MAX
from bladellm_tools.quantize.algorithms.layer import GROUPS, LayerWeights, LinearGroup
from bladellm_tools.quantize.algorithms.statistics import InputStatistics
from bladellm_tools.quantize.job import ModuleReport
from bladellm_tools.quantize.pipeline.measure import INT8_MAX, output_error, rounded_inputs_error


@dataclass(slots=True)
class LayerInputs:
    """What calibration knows of a layer: by group the statistics of its inputs, and for schemes that round those too a
    sample of them, [tokens, K]. Both empty without data."""

    statistics: dict[str, InputStatistics]
    samples: dict[str, torch.Tensor]


@dataclass(slots=True)
class RoundedLayer:
    """plain: tensors that stay in floating point, of the types they are stored in; quantized: by module.

    Both by names within the layer.
    """

    plain: LayerWeights
    quantized: dict[str, QuantizedWeight]

    def forward_weights(self, dtype: torch.dtype) -> LayerWeights:
        """The layer as plain weights of one type: what a server computes with, inputs in floating point."""
        weights = {name: tensor.to(dtype) for name, tensor in self.plain.items()}
        return weights | {f"{name}.weight": weight.dequantize().to(dtype) for name, weight in self.quantized.items()}


def heads_of(spec: ModelSpec) -> Heads:
    return Heads(spec.heads, spec.kv_heads, spec.head_dim)


def smooth_layer(
    layer: LayerWeights, groups: Sequence[LinearGroup], algorithm: Algorithm, inputs: LayerInputs, heads: Heads
) -> tuple[LayerWeights, dict[str, torch.Tensor]]:
    """The layer with smoothed inputs, and what they were divided by, by group; `inputs` are changed to match.

    A linear producer must be one that is rounded itself: modules that stay as they are take no scales.
    """
    folds: dict[str, torch.Tensor] = {}
    rounded = {member for group in groups for member in group.members}
    for group in groups:
        is_free = layer[f"{group.producer}.weight"].dim() == 1 or group.producer in rounded
        if algorithm.smoother is None or group.name not in algorithm.smoothed or not is_free:
            continue
        if not can_fold(layer, group, heads):
            continue
        weights = [layer[f"{member}.weight"].float() for member in group.members]
        scale = algorithm.smoother(group.name, weights, inputs.statistics[group.name])
        layer, folds[group.name] = fold(layer, group, scale, heads)
        inputs.statistics[group.name] = inputs.statistics[group.name].divided(folds[group.name])
        if group.name in inputs.samples:
            inputs.samples[group.name] = inputs.samples[group.name].float() / folds[group.name]
    return layer, folds


def refold(layer: LayerWeights, folds: Mapping[str, torch.Tensor], heads: Heads) -> LayerWeights:
    """The layer as `smooth_layer` left it, from what that divided by."""
    for group in GROUPS:
        if group.name in folds:
            layer, _ = fold(layer, group, folds[group.name], heads)
    return layer


def round_layer(
    layer: LayerWeights,
    stored: Mapping[str, torch.dtype],
    groups: Sequence[LinearGroup],
    algorithm: Algorithm,
    scheme: Scheme,
    inputs: LayerInputs,
    prefix: str,
) -> tuple[RoundedLayer, list[ModuleReport]]:
    """Round the weights of `groups`; the rest keeps the types in `stored`. prefix: of the modules' names in reports.

    The statistics of a group are let go of as soon as it is rounded.
    """
    quantized: dict[str, QuantizedWeight] = {}
    reports = []
    for group in groups:
        weights = [layer[f"{member}.weight"].float() for member in group.members]
        statistics, sample = inputs.statistics.pop(group.name, None), inputs.samples.pop(group.name, None)
        results = [
            _with_input_scale(one, scheme, statistics) for one in algorithm.rounder(group.members, weights, statistics)
        ]
        for member, weight, result in zip(group.members, weights, results, strict=True):
            quantized[member] = result.weight
            error = _error(weight, result.weight, statistics, sample)
            reports.append(ModuleReport(prefix + member, scheme.name, error, result.damp, result.note))
    rounded = {f"{member}.weight" for member in quantized}
    plain = {name: tensor.to(stored[name]) for name, tensor in layer.items() if name not in rounded}
    return RoundedLayer(plain, quantized), reports


def _with_input_scale(result: Rounded, scheme: Scheme, statistics: InputStatistics | None) -> Rounded:
    """With the static scale of the inputs, from the largest that calibration saw."""
    if scheme.activations != "static" or statistics is None or result.weight.input_scale is not None:
        return result
    largest = FP8_MAX if scheme.kind == "fp8" else INT8_MAX
    scale = float(statistics.absmax.max().clamp(min=torch.finfo(torch.float32).tiny * 1024) / largest)
    return replace(result, weight=replace(result.weight, input_scale=scale))


def _error(
    weight: torch.Tensor, rounded: QuantizedWeight, statistics: InputStatistics | None, sample: torch.Tensor | None
) -> float | None:
    if statistics is None:
        return None
    if sample is not None:
        return rounded_inputs_error(sample, weight, rounded)
    return output_error(statistics, weight, rounded.dequantize())
