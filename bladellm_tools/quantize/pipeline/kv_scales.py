"""Scales of an fp8 KV cache: one for the keys and one for the values of a layer, so that the largest fits."""

from collections.abc import Sequence

import torch

from bladellm_tools.quantize.algorithms.grid import FP8_MAX
from bladellm_tools.quantize.pipeline.forward import KEYS, VALUES

SUFFIXES = {KEYS: "self_attn.k_scale", VALUES: "self_attn.v_scale"}


class KvRange:
    """An observer of `forward_layer` on one device that keeps the largest magnitude of keys and values."""

    def __init__(self) -> None:
        self.largest: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, x: torch.Tensor) -> None:
        if name in SUFFIXES:
            size = x.abs().amax().float()
            self.largest[name] = torch.maximum(self.largest[name], size) if name in self.largest else size


def kv_scale_tensors(ranges: Sequence[KvRange]) -> dict[str, torch.Tensor]:
    """`self_attn.k_scale` and `self_attn.v_scale`, float32 [1] on the CPU, of what all ranges have seen together.

    1 where nothing but zeros was seen.
    """
    scales = {}
    for name, suffix in SUFFIXES.items():
        largest = torch.stack([one.largest[name].cpu() for one in ranges]).amax()
        scale = largest / FP8_MAX
        scales[suffix] = torch.where(scale > 0, scale, torch.ones_like(scale)).view(1)
    return scales
