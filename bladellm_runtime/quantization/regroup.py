"""Groups of unequal sizes made equal: a share of a layer whose groups were cut, or whose g_idx is scattered."""

from dataclasses import replace
from math import gcd

import torch

from bladellm_runtime.quantization.weight import QuantizedWeight

SMALLEST = 16
"""Inputs that share a scale, at the least, in operators that are fast."""
FILLED = 32
"""The size of groups that are filled up, where the scheme's are not smaller."""


def regrouped(weight: QuantizedWeight, group_of: torch.Tensor) -> QuantizedWeight:
    """The same weight in smaller groups of one size.

    weight: of an integer scheme with groups, its columns in the order of the inputs; its scales [N, G] may be of groups
    of any size. group_of: int64 [K], the group of every column. Groups are cut into the largest pieces that they all
    are multiples of; where those would be small they are filled up with columns of zeros instead, if there are codes
    that stand for 0.
    """
    counts = torch.bincount(group_of, minlength=weight.scales.shape[1])
    size = _piece(counts, (weight.scheme.group_size or len(group_of)) if _zero_is_a_code(weight) else 1)
    pieces = (counts + size - 1) // size
    starts = (pieces.cumsum(0) - pieces) * size
    by_group = torch.argsort(group_of, stable=True)
    groups = group_of[by_group]
    places = starts[groups] + torch.arange(len(groups), device=groups.device) - (counts.cumsum(0) - counts)[groups]
    group_of_piece = torch.repeat_interleave(pieces)
    scales = weight.scales[:, group_of_piece]
    zeros = None if weight.zeros is None else weight.zeros[:, group_of_piece]
    order = by_group.new_zeros(len(group_of_piece) * size).index_copy_(0, places, by_group)
    codes = _zero_codes(weight, zeros, scales, size).index_copy_(1, places, weight.codes[:, by_group])
    is_natural = len(order) == len(group_of) and bool((order.diff() > 0).all())
    scheme = replace(weight.scheme, group_size=size)
    return QuantizedWeight(scheme, codes, scales, zeros, None if is_natural else order, weight.input_scale)


def _piece(counts: torch.Tensor, group_size: int) -> int:
    common = gcd(*counts.tolist())
    return common if common >= min(SMALLEST, group_size) else min(FILLED, group_size)


def _zero_is_a_code(weight: QuantizedWeight) -> bool:
    """Whether every group has a code for 0: gptq knows zero points beyond the codes."""
    return weight.zeros is None or not bool((weight.zeros > weight.scheme.levels - 1).any())


def _zero_codes(weight: QuantizedWeight, zeros: torch.Tensor | None, scales: torch.Tensor, size: int) -> torch.Tensor:
    """Codes, uint8 [N, pieces · size], that stand for 0 wherever a code does."""
    middle = torch.full_like(scales, weight.scheme.middle, dtype=torch.uint8) if zeros is None else zeros
    return middle.clamp(max=weight.scheme.levels - 1).repeat_interleave(size, 1)
