"""A linear layer; in later formats than plain weights, the place of its quantization scheme."""

import torch
import torch.nn.functional as F


class Linear:
    """`x · weightᵀ + bias`: x [T, in], weight [out, in], bias [out] or None, all of one type. Returns [T, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
