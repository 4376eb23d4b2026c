"""AWQ against its definition: every scale tried on the inputs themselves."""

import itertools

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms import row_error
from bladellm_tools.quantize.algorithms.awq import AwqSmoother, rounding_loss, weight_share
from bladellm_tools.quantize.algorithms.fold import Heads, share_heads
from bladellm_tools.quantize.algorithms.grid import Grid
from tests.quantize.decoders import statistics

GRIDS = [
    Grid(Scheme(4, group_size=8), torch.bfloat16),
    Grid(Scheme(4, group_size=16, symmetric=False), torch.bfloat16),
    Grid(Scheme(4), torch.bfloat16),
]
"""Scales stored in float32 would leave the largest weights half way between two codes, the last bit to decide."""


def inputs(tokens: int = 70, columns: int = 32) -> torch.Tensor:
    """Correlated, some channels far larger than others."""
    return torch.randn(tokens, columns) @ torch.randn(columns, columns) * 10 ** torch.empty(columns).uniform_(-1, 1)


def loss(weights: list[torch.Tensor], scale: torch.Tensor, x: torch.Tensor, grid: Grid) -> float:
    """Mean over tokens of the outputs' squared error, from the outputs."""
    total = 0.0
    for weight in weights:
        rounded = grid.quantize(weight * scale).dequantize()
        total += float(((x / scale).double() @ rounded.T.double() - x.double() @ weight.T.double()).square().sum())
    return total / len(x)


def candidates(weights: list[torch.Tensor], x: torch.Tensor, grid: Grid, duo: bool) -> list[torch.Tensor]:
    """The scales of AutoAWQ's grid, a channel at a time, and no scaling."""
    size, share = grid.scheme.group_size or x.shape[1], []
    rows = [row for weight in weights for row in weight.abs()]
    for channel in range(x.shape[1]):
        first = channel // size * size
        share.append(sum(float(row[channel] / row[first : first + size].max()) for row in rows) / len(rows))
    found = [torch.ones(x.shape[1])]
    for ratio in (step / 20 for step in range(20)):
        scale = x.abs().mean(0) ** ratio
        if duo:
            scale = scale / (torch.tensor(share) ** (1 - ratio) + 1e-4)
        scale = scale.clamp(min=1e-4)
        found.append(scale / (scale.max() * scale.min()).sqrt())
    return found


@pytest.mark.parametrize(("grid", "duo"), list(itertools.product(GRIDS, (True, False))), ids=str)
def test_finds_the_best_scale(grid: Grid, duo: bool) -> None:
    x, weights = inputs(), [torch.randn(9, 32), torch.randn(5, 32)]
    tried = candidates(weights, x, grid, duo)
    losses = [loss(weights, scale, x, grid) for scale in tried]
    found = AwqSmoother(grid, duo_scaling=duo)("qkv", weights, statistics(x))
    assert loss(weights, found, x, grid) == pytest.approx(min(losses), rel=1e-3)
    assert min(float((found - scale).abs().max()) for scale in tried) < 1e-4 * float(found.max())


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_the_loss_is_that_of_the_outputs(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, scale = inputs(), torch.randn(13, 32), torch.rand(32) + 0.2
    gram, expected = statistics(x).gram, loss([weight], scale, x, grid)
    assert float(rounding_loss(weight, scale, gram, grid)) == pytest.approx(expected, rel=1e-3)
    monkeypatch.setattr(row_error, "BLOCK", 32 * 4)
    assert float(rounding_loss(weight, scale, gram, grid)) == pytest.approx(expected, rel=1e-3)


def on_grid(rows: int) -> torch.Tensor:
    """Weights that `GRIDS[1]` rounds without loss: every group holds its lowest and its highest code."""
    codes = torch.randint(-8, 8, (rows, 2, 16))
    codes[:, :, 3], codes[:, :, 11] = -8, 7
    return codes.view(rows, 32) / 8


def test_never_worse_than_plain_rounding() -> None:
    """Weights that lie on their grid already lose nothing unless they are scaled."""
    for duo in (True, False):
        smoother = AwqSmoother(GRIDS[1], duo_scaling=duo)
        assert torch.equal(smoother("down", [on_grid(20)], statistics(inputs())), torch.ones(32))


def test_scales_of_the_output_group_are_shared() -> None:
    heads, grid, x = Heads(4, 2, 8), GRIDS[0], torch.randn(70, 32)
    x[:, [3, 20]] *= 30
    weights, seen = [torch.randn(60, 32)], statistics(x)
    found = AwqSmoother(grid, heads)("output", weights, seen)
    assert torch.equal(share_heads(found, heads), found)
    assert found.unique().numel() > 1
    shared = [share_heads(scale, heads) for scale in candidates(weights, x, grid, False)]
    assert loss(weights, found, x, grid) == pytest.approx(min(loss(weights, s, x, grid) for s in shared), rel=1e-3)


def test_dead_channels_and_dead_inputs() -> None:
    x, weight = inputs(), torch.randn(9, 32)
    x[:, 5], weight[:, 9], weight[:, 16:24] = 0, 0, 0
    for given in (x, torch.zeros_like(x)):
        scale = AwqSmoother(GRIDS[0])("qkv", [weight], statistics(given))
        assert torch.isfinite(scale).all()
        assert (scale > 0).all()


def test_share_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_error, "BLOCK", 16 * 2)
    weight = torch.randn(7, 16)
    expected = [
        sum(abs(row[k]) / row[k // 8 * 8 : k // 8 * 8 + 8].abs().max() for row in weight) / 7 for k in range(16)
    ]
    torch.testing.assert_close(weight_share(weight, GRIDS[0]), torch.stack(expected))
