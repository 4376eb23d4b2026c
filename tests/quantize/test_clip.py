"""The clip search against every ratio tried, an output and a group at a time, with the inputs themselves."""

import pytest
import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_tools.quantize.algorithms import row_error
from bladellm_tools.quantize.algorithms.clip import ClipRounder, clipped
from bladellm_tools.quantize.algorithms.grid import Grid
from tests.quantize.decoders import statistics

RATIOS = (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
GRIDS = [
    Grid(Scheme(4, group_size=8), torch.float32),
    Grid(Scheme(4, group_size=8, symmetric=False), torch.bfloat16),
    Grid(Scheme(4), torch.float32),
    Grid(Scheme(8, kind="fp8"), torch.float32),
]


def output_error(weight: torch.Tensor, rounded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x.double() @ (rounded.double() - weight.double())).square().mean())


def tried(weight: torch.Tensor, x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Of each output, group after group, the ratio that leaves the least error of the output."""
    size = grid.scheme.group_size or weight.shape[1]
    best = torch.ones(weight.shape[0], weight.shape[1] // size)
    for row, group in ((row, group) for row in range(best.shape[0]) for group in range(best.shape[1])):
        errors = []
        for ratio in RATIOS:
            best[row, group] = ratio
            errors.append(output_error(weight[row], grid.quantize(weight, best).dequantize()[row], x))
        best[row, group] = RATIOS[errors.index(min(errors))]
    return best


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_finds_the_best_of_all_ratios(grid: Grid) -> None:
    weight = torch.randn(6, 24) * (1 + 3 * (torch.rand(6, 24) > 0.9))
    x = torch.randn(50, 24) @ torch.randn(24, 24) + torch.randn(24)
    torch.testing.assert_close(clipped(weight, statistics(x).gram, grid), tried(weight, x, grid))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_no_output_loses(grid: Grid) -> None:
    weight = torch.randn(200, 32)
    x = torch.randn(300, 3) @ torch.randn(3, 32) + 0.1 * torch.randn(300, 32)
    gram = statistics(x).gram
    before = row_error.row_errors(grid.quantize(weight).dequantize() - weight, gram)
    narrow = grid.quantize(weight, clipped(weight, gram, grid)).dequantize()
    after = row_error.row_errors(narrow - weight, gram)
    assert (after <= before * 1.0001).all()
    assert after.sum() < before.sum()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gram = torch.randn(11, 24), statistics(torch.randn(40, 24)).gram
    whole = clipped(weight, gram, GRIDS[1])
    monkeypatch.setattr(row_error, "BLOCK", 24 * 3 + 5)
    assert [rows.stop - rows.start for rows in row_error.row_blocks(11, 24)] == [3, 3, 3, 2]
    assert torch.equal(clipped(weight, gram, GRIDS[1]), whole)


@pytest.mark.parametrize("grid", GRIDS[:3], ids=str)
def test_the_rounder_uses_what_was_found(grid: Grid) -> None:
    x, names = torch.randn(60, 32), ["self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"]
    weights, seen = [torch.randn(10, 32) ** 3 for _ in names], statistics(x)
    for weight, rounded in zip(weights, ClipRounder(grid)(names, weights, seen), strict=True):
        expected = grid.quantize(weight, tried(weight, x, grid))
        assert torch.equal(rounded.weight.scales, expected.scales)
        assert torch.equal(rounded.weight.dequantize(), expected.dequantize())
        assert not torch.equal(rounded.weight.scales, grid.quantize(weight).scales)
    with pytest.raises(ValueError, match=r"mlp\.down_proj"):
        ClipRounder(grid)(names, weights, None)
