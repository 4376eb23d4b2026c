"""Plain rounding against the definition of the grid, a weight at a time."""

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.minmax import MinMax


def distances(values: list[float], bits: int, symmetric: bool) -> list[float]:
    """How far one group's weights are from their grid, every code tried."""
    levels = 2**bits
    low, high = min(*values, 0.0), max(*values, 0.0)
    if symmetric:
        scale, zero = max(map(abs, values)) / ((levels - 1) / 2), levels // 2
    else:
        scale = (high - low) / (levels - 1)
        zero = round(-low / scale)
    grid = [scale * (code - zero) for code in range(levels)]
    return [min(abs(point - value) for point in grid) for value in values]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "size"), [(4, 8), (8, 24), (4, None)])
def test_every_weight_takes_its_nearest_code(bits: int, size: int | None, symmetric: bool) -> None:
    grid = Grid(Scheme(bits, group_size=size, symmetric=symmetric), torch.float32)
    weights = [torch.randn(7, 24), torch.rand(3, 24) + 0.1]
    rounded = MinMax(grid)(["self_attn.q_proj", "self_attn.k_proj"], weights, None)
    for weight, result in zip(weights, rounded, strict=True):
        assert result.damp is None
        assert result.note is None
        groups = weight.double().view(len(weight), -1, size or 24).tolist()
        expected = torch.tensor([[distances(group, bits, symmetric) for group in row] for row in groups])
        distance = (result.weight.dequantize() - weight).abs()
        torch.testing.assert_close(distance, expected.view_as(weight), rtol=1e-4, atol=1e-6)
