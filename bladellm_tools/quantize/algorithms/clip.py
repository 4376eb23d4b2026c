"""AWQ's clip search: ranges narrower than the weights' own, where the outputs gain by it (arXiv 2306.00978, its code).

Of each output, group after group, the ratio of the range that makes the output's whole error Δw·G·Δwᵀ least, Δw the
rounding error of its weights and G the inputs' Gram matrix: the mean over all tokens, exactly. The paper's code judges
a group by the error it makes alone, Δw_g·G_gg·Δw_gᵀ. But groups read correlated inputs: what they gain alone can be a
loss together. Counting the errors of the other groups as they stand, no choice is ever worse than no clipping. q_proj
and k_proj, which that code leaves out, are clipped too: with whole errors they gain like the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bladellm_tools.quantize.algorithms.algorithm import Rounded
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.row_error import row_blocks
from bladellm_tools.quantize.algorithms.statistics import InputStatistics

RATIOS = tuple(1 - step / 20 for step in range(11))
"""1, no clipping, down to 0.5."""


@dataclass(frozen=True, slots=True)
class ClipRounder:
    """Narrows the ranges by the outputs' error, then rounds to the nearest code."""

    grid: Grid

    def __call__(
        self, modules: Sequence[str], weights: Sequence[torch.Tensor], statistics: InputStatistics | None
    ) -> list[Rounded]:
        """As `Rounder`. Raises ValueError without statistics."""
        if statistics is None:
            raise ValueError(f"the clip search needs the inputs of {', '.join(modules)}")
        return [Rounded(self.grid.quantize(weight, clipped(weight, statistics.gram, self.grid))) for weight in weights]


def clipped(weight: torch.Tensor, gram: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The `shrink` [N, G] of `Grid.quantize` for weight, float32 [N, K]; gram float32 [K, K].

    About N·K² multiplications and a half, whatever the number of ratios.
    """
    ratios = torch.tensor(RATIOS, device=weight.device)
    blocks = row_blocks(weight.shape[0], weight.shape[1])
    return torch.cat([_clipped_rows(weight[rows], gram, grid, ratios) for rows in blocks])


def _clipped_rows(weight: torch.Tensor, gram: torch.Tensor, grid: Grid, ratios: torch.Tensor) -> torch.Tensor:
    groups = grid.scheme.groups(weight.shape[1])
    size = weight.shape[1] // groups
    slope = (grid.quantize(weight).dequantize() - weight) @ gram
    chosen = []
    for start in range(0, weight.shape[1], size):
        end = start + size
        best, change = _best_ratio(weight[:, start:end], slope[:, start:end], gram[start:end, start:end], grid, ratios)
        slope[:, end:] += change @ gram[start:end, end:]
        chosen.append(best)
    return torch.stack(chosen, 1)


def _best_ratio(
    weight: torch.Tensor, slope: torch.Tensor, gram: torch.Tensor, grid: Grid, ratios: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one group: the ratio of each output [N], and by how much it moves the rounded weights [N, K / G].

    slope: Δw·G [N, K / G], half the gradient of the whole error; moving by d changes the error by d·G·dᵀ + 2·d·slope.
    """
    rows, columns = weight.shape
    tried = weight.repeat(len(ratios), 1)
    rounded = grid.quantize(tried, ratios.repeat_interleave(rows).unsqueeze(1)).dequantize()
    moves = rounded.view(len(ratios), rows, columns)
    moves = moves - moves[0]
    changes = ((moves @ gram + 2 * slope) * moves).sum(2)
    best = changes.argmin(0)
    return ratios[best], moves[best, torch.arange(rows, device=weight.device)]
