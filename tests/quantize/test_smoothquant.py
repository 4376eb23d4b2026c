"""SmoothQuant's formula a channel at a time, and what it is for: rounding inputs that have outliers."""

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.smoothquant import SmoothQuant
from tests.quantize.decoders import statistics


@pytest.mark.parametrize("alpha", [0.0, 0.35, 0.5, 1.0])
def test_the_formula(alpha: float) -> None:
    x, weights = torch.randn(31, 17) * torch.rand(17) * 9, [torch.randn(5, 17), torch.randn(3, 17)]
    scale = SmoothQuant(alpha)("qkv", weights, statistics(x))
    for channel in range(17):
        activation = max(abs(float(value)) for value in x[:, channel])
        weight = max(abs(float(row[channel])) for part in weights for row in part)
        assert float(scale[channel]) == pytest.approx(activation**alpha / weight ** (1 - alpha), rel=1e-5)


def test_channels_without_inputs_or_weights_stay() -> None:
    x, weight = torch.randn(8, 6), torch.randn(4, 6)
    x[:, 1], weight[:, 2] = 0, 0
    x[:, 3], weight[:, 4] = 1e-30, 1e-30
    scale = SmoothQuant(0.7)("gate_up", [weight], statistics(x))
    assert scale[1] == scale[2] == 1
    assert scale[3] == pytest.approx(1e-5**0.7 / float(weight[:, 3].abs().max()) ** 0.3, rel=1e-4)
    assert torch.isfinite(scale).all()
    assert (scale >= 1e-5).all()


def test_outliers_of_inputs_lose_their_harm() -> None:
    """8-bit weights by output, 8-bit inputs by token: a linear layer with one channel two hundred times the others."""
    x, weight = torch.randn(64, 40), torch.randn(30, 40)
    x[:, 7] *= 200
    scale = SmoothQuant(0.5)("qkv", [weight], statistics(x))
    grid = Grid(Scheme(8), torch.float32)

    def error(inputs: torch.Tensor, columns: torch.Tensor) -> float:
        steps = inputs.abs().amax(1, keepdim=True) / 127
        outputs = (inputs / steps).round() * steps @ grid.quantize(columns).dequantize().T
        return float((outputs - x @ weight.T).square().mean())

    assert error(x / scale, weight * scale) < error(x, weight) / 3
