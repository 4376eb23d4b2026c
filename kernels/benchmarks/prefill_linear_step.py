"""All linear layers of a prefill in their order, with norms and activations: what `prefill_linears.py` times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from bladellm_kernels.many_rows_linear import launch_many_rows
from bladellm_kernels.rms_norm import add_rms_norm, rms_norm
from bladellm_kernels.silu_mul import silu_mul
from torch import Tensor

STEPS = {
    "now": "F.linear, and kernels for the rest",
    "residual": "the residual as C of cuBLAS's output and down projections, in place",
    "gated": "gate-up and SiLU · mul by the own kernel",
    "both": "both of these",
    "own": "all four by the own kernel",
}
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Layers:
    """Weights of all layers by shape: qkv, o, gate-up, down; a norm's; and what enters: the last layer's output, the
    residual stream and attention's output, [M, hidden] each."""

    weights: Mapping[str, Sequence[Tensor]]
    norm: Tensor
    x: Tensor
    stream: Tensor
    attended: Tensor

    def of_rows(self, rows: int) -> "Layers":
        """The same for the first rows alone."""
        first = (each[:rows] for each in (self.x, self.stream, self.attended))
        return Layers(self.weights, self.norm, *first)


def numbers(data: str, *shape: int, device: str = "cuda") -> Tensor:
    """data: zeros or random."""
    if data == "zeros":
        return torch.zeros(shape, device=device, dtype=torch.bfloat16)
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def random_layers(
    count: int, rows: int, shapes: Mapping[str, tuple[int, int]], data: str, device: str = "cuda"
) -> Layers:
    """shapes: outputs and inputs of the weights, in their order."""
    weights = {
        name: [numbers(data, outputs, inputs, device=device) * inputs**-0.5 for _ in range(count)]
        for name, (outputs, inputs) in shapes.items()
    }
    hidden = shapes["qkv"][1]
    entering = (numbers(data, rows, hidden, device=device) for _ in range(3))
    return Layers(weights, numbers(data, hidden, device=device), *entering)


def step(layers: Layers, way: str) -> Tensor:
    """All layers by one of `STEPS`; every one reads what the one before wrote. Returns the last norm's result."""
    normed = add_rms_norm(layers.x, layers.stream, layers.norm, EPS, total=layers.stream)[0]
    for qkv, output, gate_up, down in zip(*layers.weights.values(), strict=True):
        own(normed, qkv) if way == "own" else F.linear(normed, qkv)
        normed = added_and_normed(layers.attended, output, layers, way)
        gated = own(normed, gate_up, 2) if way in ("gated", "both", "own") else silu_mul(F.linear(normed, gate_up))
        normed = added_and_normed(gated, down, layers, way)
    return normed


def added_and_normed(x: Tensor, weight: Tensor, layers: Layers, way: str) -> Tensor:
    """The layer's output added to the residual stream, in place, and normalised."""
    if way in ("residual", "both"):
        torch.addmm(layers.stream, x, weight.t(), out=layers.stream)
        return rms_norm(layers.stream, layers.norm, EPS)
    y = own(x, weight) if way == "own" else F.linear(x, weight)
    return add_rms_norm(y, layers.stream, layers.norm, EPS, total=layers.stream)[0]


def own(x: Tensor, weight: Tensor, parts: int = 1) -> Tensor:
    """By `many_rows_linear`."""
    out = torch.empty(len(x), len(weight) // parts, device=x.device, dtype=x.dtype)
    launch_many_rows(x, weight, out, parts)
    return out
