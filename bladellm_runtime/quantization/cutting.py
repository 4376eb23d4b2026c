"""Parts of a quantized weight, as ranks hold them: some of its outputs or inputs, and places that compute exactly 0."""

import math
from dataclasses import replace

import torch

from bladellm_runtime.quantization.weight import QuantizedWeight

FEWEST = 16
"""Inputs of a scale, at least, where groups are cut into smaller ones; kernels know none with fewer."""
UNITS = (128, 64, 32, FEWEST)
"""Group sizes to choose from where groups must be filled up."""
WASTE = 8
"""A larger unit may fill up with one part in so many more than the best one."""


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
    inputs as they lie, the inputs are sorted by group, those of a group filled up with zeros; the `order` then has more
    or fewer columns than there are inputs.
    """
    places = inputs.to(weight.codes.device)
    if weight.order is not None:
        inverse = torch.empty_like(weight.order)
        inverse[weight.order] = torch.arange(len(inverse), device=inverse.device)
        places = torch.where(places < 0, -1, inverse[places.clamp(min=0)])
    count = weight.scales.shape[1]
    if count == 1:
        return _gather(weight, places, len(places), None)
    size = weight.columns // count
    groups = torch.where(places < 0, -1, places // size)
    if unit := _fitting_unit(groups, size):
        return _gather(weight, places, unit, None)
    order = (places >= 0).nonzero().flatten()
    order = order[places[order].argsort()]
    counts = groups[order].bincount(minlength=count)
    unit = _filled_unit(counts, size) if _zero_is_a_code(weight) else math.gcd(*counts.tolist())
    filled, target = _fill_up(counts, unit)
    return _gather(weight, _spread(places[order], target, filled, -1), unit, _spread(order, target, filled, 0))


def _gather(weight: QuantizedWeight, places: torch.Tensor, unit: int, order: torch.Tensor | None) -> QuantizedWeight:
    """The columns of the codes at `places`, -1 for zeros, every `unit` of them of one group."""
    blocks = places.view(-1, unit).amax(1).clamp(min=0) // (weight.columns // weight.scales.shape[1])
    zeros = None if weight.zeros is None else weight.zeros.index_select(1, blocks)
    codes, padding = _select(weight.codes, 1, places.clamp(min=0)), places < 0
    if bool(padding.any()):
        codes.view(torch.uint8)[:, padding] = _zero_codes(weight, zeros, padding, unit)
    scheme = weight.scheme if weight.scheme.group_size is None else replace(weight.scheme, group_size=unit)
    return QuantizedWeight(scheme, codes, weight.scales.index_select(1, blocks), zeros, order, weight.input_scale)


def _zero_codes(
    weight: QuantizedWeight, zeros: torch.Tensor | None, columns: torch.Tensor, unit: int
) -> torch.Tensor | int:
    """The codes of `columns`, bool [K], that stand for 0, as bytes; the nearest ones where none does."""
    if zeros is None:
        return weight.scheme.middle if weight.scheme.kind == "int" else 0
    return zeros.repeat_interleave(unit, 1)[:, columns].clamp(max=weight.scheme.levels - 1)


def _zero_is_a_code(weight: QuantizedWeight) -> bool:
    """Whether all groups have a code for 0; gptq knows zero points beyond the codes."""
    return weight.zeros is None or not bool((weight.zeros > weight.scheme.levels - 1).any())


def _fitting_unit(groups: torch.Tensor, size: int) -> int | None:
    """The largest part of a group's `size` such that all inputs of every so many neighbours are of one group."""
    for unit in range(size, min(FEWEST, size) - 1, -1):
        if size % unit == 0 and len(groups) % unit == 0:
            blocks = groups.view(-1, unit)
            largest = blocks.amax(1, keepdim=True)
            if bool(((blocks == largest) | (blocks < 0)).all()):
                return unit
    return None


def _filled_unit(counts: torch.Tensor, size: int) -> int:
    """The largest unit that groups of so many inputs can be filled up to without much waste."""
    units = [unit for unit in UNITS if unit <= size] or [size]
    filled = {unit: int(((counts + unit - 1) // unit * unit).sum()) for unit in units}
    most = min(filled.values()) * (WASTE + 1)
    return next(unit for unit in units if filled[unit] * WASTE <= most)


def _fill_up(counts: torch.Tensor, unit: int) -> tuple[int, torch.Tensor]:
    """Places in all when every group is filled up to whole units, and the place of each input, int64."""
    filled = (counts + unit - 1) // unit * unit
    shift = (filled.cumsum(0) - filled) - (counts.cumsum(0) - counts)
    places = torch.arange(int(counts.sum()), device=counts.device) + shift.repeat_interleave(counts)
    return int(filled.sum()), places


def _spread(values: torch.Tensor, places: torch.Tensor, size: int, padding: int) -> torch.Tensor:
    spread = torch.full((size,), padding, dtype=values.dtype, device=values.device)
    spread[places] = values
    return spread


def _select(codes: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).index_select(dim, index).view(codes.dtype)  # fp8 cannot be indexed on every device
