"""Parts of a quantized weight, as ranks hold them: some of its outputs or inputs, and places that compute exactly 0."""

from dataclasses import replace

import torch

from bladellm_runtime.quantization.regroup import SMALLEST, regrouped
from bladellm_runtime.quantization.weight import QuantizedWeight


def take_outputs(weight: QuantizedWeight, outputs: torch.Tensor) -> QuantizedWeight:
    """The weight of these outputs, int64 [M], -1 for one that is 0 whatever the input."""
    outputs = outputs.to(weight.codes.device)
    rows, padding = outputs.clamp(min=0), outputs < 0
    codes = _select(weight.codes, 0, rows)
    zeros = None if weight.zeros is None else weight.zeros.index_select(0, rows)
    if bool(padding.any()):
        middle = weight.scheme.middle if weight.scheme.kind == "int" else 0
        codes.view(torch.uint8)[padding] = middle
        if zeros is not None:
            zeros[padding] = middle
    return replace(weight, codes=codes, scales=weight.scales.index_select(0, rows), zeros=zeros)


def take_inputs(weight: QuantizedWeight, inputs: torch.Tensor) -> QuantizedWeight:
    """The weight of these inputs, int64 [M], -1 for one that is 0 in every x.

    Groups that lose inputs become groups of a smaller size, each with the scale of the whole. Where none fits the
    inputs as they lie, the inputs are sorted by group (`regrouped`).
    """
    places = inputs.to(weight.codes.device)
    if weight.order is not None:
        inverse = torch.empty_like(weight.order)
        inverse[weight.order] = torch.arange(len(inverse), device=inverse.device)
        places = torch.where(places < 0, -1, inverse[places.clamp(min=0)])
    if weight.scales.shape[1] == 1:
        return _gather(weight, places, len(places))
    size = weight.columns // weight.scales.shape[1]
    groups = torch.where(places < 0, -1, places // size)
    if unit := _fitting_unit(groups, size):
        return _gather(weight, places, unit)
    kept = (places >= 0).nonzero().flatten()
    part = replace(weight, codes=_select(weight.codes, 1, places[kept]), order=None)
    return _move_inputs(regrouped(part, groups[kept]), kept)


def pad_inputs(weight: QuantizedWeight, inputs: torch.Tensor) -> QuantizedWeight:
    """The same weight with further inputs that are 0 in every x. inputs: int64 [M], its own ones in order, and -1."""
    kept = (inputs >= 0).nonzero().flatten().to(weight.codes.device)
    if len(kept) == len(inputs):
        return weight
    return take_inputs(weight, inputs) if weight.order is None else _move_inputs(weight, kept)


def _move_inputs(weight: QuantizedWeight, inputs: torch.Tensor) -> QuantizedWeight:
    """The same weight where its input k is input `inputs[k]`, int64, of a layer whose other inputs are always 0."""
    return replace(weight, order=inputs if weight.order is None else inputs[weight.order])


def _gather(weight: QuantizedWeight, places: torch.Tensor, unit: int) -> QuantizedWeight:
    """The columns of the codes at `places`, -1 for zeros, every `unit` of them of one group."""
    blocks = places.view(-1, unit).amax(1).clamp(min=0) // (weight.columns // weight.scales.shape[1])
    zeros = None if weight.zeros is None else weight.zeros.index_select(1, blocks)
    codes, padding = _select(weight.codes, 1, places.clamp(min=0)), places < 0
    if bool(padding.any()):
        codes.view(torch.uint8)[:, padding] = _zero_codes(weight, zeros, padding, unit)
    scheme = weight.scheme if weight.scheme.group_size is None else replace(weight.scheme, group_size=unit)
    return QuantizedWeight(scheme, codes, weight.scales.index_select(1, blocks), zeros, None, weight.input_scale)


def _zero_codes(
    weight: QuantizedWeight, zeros: torch.Tensor | None, columns: torch.Tensor, unit: int
) -> torch.Tensor | int:
    """The codes of `columns`, bool [K], that stand for 0, as bytes; the nearest ones where none does."""
    if zeros is None:
        return weight.scheme.middle if weight.scheme.kind == "int" else 0
    return zeros.repeat_interleave(unit, 1)[:, columns].clamp(max=weight.scheme.levels - 1)


def _fitting_unit(groups: torch.Tensor, size: int) -> int | None:
    """The largest part of a group's `size` such that all inputs of every so many neighbours are of one group."""
    for unit in range(size, min(SMALLEST, size) - 1, -1):
        if size % unit == 0 and len(groups) % unit == 0:
            blocks = groups.view(-1, unit)
            largest = blocks.amax(1, keepdim=True)
            if bool(((blocks == largest) | (blocks < 0)).all()):
                return unit
    return None


def _select(codes: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).index_select(dim, index).view(codes.dtype)  # fp8 cannot be indexed on every device
