"""GPTQ's pass over the columns of a weight, in blocks (Frantar et al., arXiv:2210.17323, algorithm 1)."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from bladellm_kernels.gptq_block import ColumnGrid, gptq_block

from bladellm_runtime.quantization.weight import QuantizedWeight
from bladellm_tools.quantize.algorithms.grid import Grid

SEARCH_RATIOS = tuple(1 - 0.02 * step for step in range(21))
"""Shrinkages of a range that the search tries, the whole range first."""

_SEARCH_NUMBERS = 2**24


@dataclass(frozen=True, slots=True)
class Columns:
    """How the columns of a weight are gone through.

    order: int64 [K], the input of each column, in the order they are rounded. groups: int64 [K], the group whose scale
    each takes. fixed: scales are those of the weight before the pass; else a group's are taken when the pass enters it,
    with the errors of the columns before it spread, and its columns must follow each other.
    """

    order: torch.Tensor
    groups: torch.Tensor
    fixed: bool


@dataclass(slots=True)
class _Ranges:
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def put(self, group: int, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        self.scales[:, group] = scales[:, 0].float()
        if self.zeros is not None and zeros is not None:
            self.zeros[:, group] = zeros[:, 0]


def solve(
    weight: torch.Tensor,
    upper: torch.Tensor,
    grid: Grid,
    columns: Columns,
    block: int,
    importance: torch.Tensor | None,
) -> QuantizedWeight:
    """Round weight, float32 [N, K]; the codes' columns are in the order of `columns`, and `order` is not set.

    upper: float32 [K, K], factor of the inverse Hessian with rows and columns in that order. block: columns rounded
    before their errors are spread over the rest. importance: float32 [K], of each input (in its natural place): ranges
    are searched for the least error weighted with it; None leaves them whole.
    """
    size = weight.shape[1] // grid.scheme.groups(weight.shape[1])
    ranges = _ranges(weight, grid, importance, empty=not columns.fixed)
    rest = weight[:, columns.order]
    codes = torch.empty(rest.shape, dtype=_code_dtype(grid), device=rest.device)
    bits = grid.scheme.bits if grid.scheme.kind == "int" else None
    for start, end in _steps(rest.shape[1], block, None if columns.fixed else size):
        if not columns.fixed and start % size == 0:
            part = slice(start, start + size)
            weights = None if importance is None else importance[columns.order[part]]
            ranges.put(int(columns.groups[start]), *search_ranges(rest[:, part], grid, weights))
        column_grid = ColumnGrid(ranges.scales, ranges.zeros, columns.groups[start:end], bits)
        codes[:, start:end], errors = gptq_block(rest[:, start:end], upper[start:end, start:end], column_grid)
        rest[:, end:].addmm_(errors, upper[start:end, end:], alpha=-1)
    return QuantizedWeight(grid.scheme, codes, ranges.scales.to(grid.scale_dtype), ranges.zeros)


def search_ranges(
    weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero points of weight, float32 [N, K], as `Grid.ranges` gives them.

    With importance, float32 [K], every range is shrunk by the ratio of `SEARCH_RATIOS` that makes the sum of
    importance · (weight − rounded)² least.
    """
    if importance is None:
        return grid.ranges(weight)
    rows = max(1, _SEARCH_NUMBERS // weight.shape[1])
    parts = [grid.ranges(part, _best_shrink(part, grid, importance)) for part in weight.split(rows)]
    zeros = [each for _, each in parts if each is not None]
    return torch.cat([scales for scales, _ in parts]), torch.cat(zeros) if zeros else None


def _best_shrink(weight: torch.Tensor, grid: Grid, importance: torch.Tensor) -> torch.Tensor:
    weight = weight.contiguous()
    shape = (len(weight), grid.scheme.groups(weight.shape[1]))
    best = weight.new_full(shape, torch.inf)
    shrink = weight.new_ones(shape)
    for ratio in SEARCH_RATIOS:
        difference = grid.quantize(weight, ratio).dequantize().sub_(weight)
        error = grid.grouped(difference.square_().mul_(importance)).sum(2)
        shrink = torch.where(error < best, ratio, shrink)
        best = torch.minimum(best, error)
    return shrink


def _ranges(weight: torch.Tensor, grid: Grid, importance: torch.Tensor | None, empty: bool) -> _Ranges:
    """Float32 scales (their values fit the type they are stored in) and zero points, to be filled where `empty`.

    A group's scales are contiguous.
    """
    if not empty:
        scales, zeros = search_ranges(weight, grid, importance)
        return _Ranges(scales.float().t().contiguous().t(), None if zeros is None else zeros.t().contiguous().t())
    shape = (grid.scheme.groups(weight.shape[1]), len(weight))
    symmetric = grid.scheme.symmetric or grid.scheme.kind == "fp8"
    zeros = None if symmetric else torch.empty(shape, dtype=torch.uint8, device=weight.device).t()
    return _Ranges(torch.empty(shape, device=weight.device).t(), zeros)


def _steps(columns: int, block: int, group: int | None) -> Iterator[tuple[int, int]]:
    """First and last + 1 of the columns of every block; none holds columns of two groups where `group` is given."""
    start = 0
    while start < columns:
        end = min(start + block, columns)
        if group is not None:
            end = min(end, (start // group + 1) * group)
        yield start, end
        start = end


def _code_dtype(grid: Grid) -> torch.dtype:
    return torch.uint8 if grid.scheme.kind == "int" else torch.float8_e4m3fn
