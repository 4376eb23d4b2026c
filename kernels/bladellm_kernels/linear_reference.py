"""Quantized linear layers written out in float64."""

import torch


def reference_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    middle: float,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`x @ (scales · (codes − zeros)).T + bias`, `middle` where zeros is None. Returns float64 [T, N]."""
    rows, columns = codes.shape
    values = codes.double().view(rows, scales.shape[1], -1)
    values = values - (middle if zeros is None else zeros.double().unsqueeze(2))
    weight = (values * scales.double().unsqueeze(2)).view(rows, columns)
    y = x.double() @ weight.t()
    return y if bias is None else y + bias.double()
