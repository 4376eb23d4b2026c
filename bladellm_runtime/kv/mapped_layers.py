"""Layers as strided views of mapped memory, and their granules where all of them are mapped side by side."""

from collections.abc import Sequence

import torch

from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.spec import KvSpec


def layer_views(ranges: Sequence[torch.Tensor], spec: KvSpec, shape: KvShape) -> list[torch.Tensor]:
    """Each layer's rows, [rows, 2, Hk, W], the layers in order.

    ranges: uint8, one a group, all the addresses that slots reserve, of as many tokens. A row of a group is
    [layer][Hk][K or V][W] in memory: the K and V of one head and token are neighbours, the layers of a group take
    turns within a token.
    """
    width = shape.format.width(shape.head_dim)
    rows = ranges[0].numel() // spec.groups[0].token_bytes
    layers: dict[int, torch.Tensor] = {}
    for group, addresses in zip(spec.groups, ranges, strict=True):
        flat = addresses.view(shape.format.dtype(shape.dtype))
        row = 2 * shape.kv_heads * width
        for index, layer in enumerate(group.layers):
            strides = (row * len(group.layers), width, 2 * width, 1)
            layers[layer] = flat.as_strided((rows, 2, shape.kv_heads, width), strides, index * row)
    return [layers[layer] for layer in sorted(layers)]


def granule_views(homes: Sequence[torch.Tensor], spec: KvSpec) -> list[torch.Tensor]:
    """homes: uint8, one a group, all its granules in order -> each as [granules, granule_tokens, bytes of a token]."""
    shape = (spec.num_granules, spec.granule_tokens)
    return [home.view(*shape, group.token_bytes) for home, group in zip(homes, spec.groups, strict=True)]
