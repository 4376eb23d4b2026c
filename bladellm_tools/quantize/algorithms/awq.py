"""AWQ: scale up the weights that matter before rounding, as their inputs tell (arXiv 2306.00978).

Section 3.2: s = mean|x|^r, r searched over a grid of [0, 1) for the least ‖(Q(W·diag(s))·diag(s)⁻¹ − W)·X‖², s
balanced by √(max s · min s). Duo scaling (an option; AutoAWQ's default) divides s by w^(1 − r) as well, w the mean over
outputs of |W| as a share of its group's largest. The loss of a linear layer follows from the Gram matrix of its inputs:
a grid point costs N·K² multiplications however many tokens there are, and all of them count. A group's losses add up.
"""

from dataclasses import dataclass

import torch

from bladellm_tools.quantize.algorithms.fold import Heads, share_heads
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.row_error import row_blocks, row_errors
from bladellm_tools.quantize.algorithms.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class AwqSmoother:
    """Searches s of a group. s = 1 is always a candidate: the calibration loss never exceeds plain rounding's.

    heads: the attention's, so that the candidates for o_proj are such that v_proj can take. On CUDA products of
    bfloat16 rank the candidates (on the test model they chose the same r everywhere); float32 compares the best with
    s = 1.
    """

    grid: Grid
    heads: Heads | None = None
    steps: int = 20
    duo_scaling: bool = False

    def __call__(self, group: str, weights: list[torch.Tensor], statistics: InputStatistics) -> torch.Tensor:
        weight = torch.cat(weights)
        found = self._search(weight, self._candidates(group, weight, statistics), statistics.gram)
        plain = torch.ones_like(found)
        losses = [rounding_loss(weight, scale, statistics.gram, self.grid) for scale in (found, plain)]
        return found if losses[0] < losses[1] else plain

    def _candidates(self, group: str, weight: torch.Tensor, statistics: InputStatistics) -> list[torch.Tensor]:
        share = weight_share(weight, self.grid) if self.duo_scaling else None
        scales = [candidate(statistics.absmean, share, step / self.steps) for step in range(self.steps)]
        if group != "output" or self.heads is None:
            return scales
        return [share_heads(scale, self.heads) for scale in scales]

    def _search(self, weight: torch.Tensor, scales: list[torch.Tensor], gram: torch.Tensor) -> torch.Tensor:
        coarse = gram.bfloat16() if gram.is_cuda else gram
        losses = [rounding_loss(weight, scale, coarse, self.grid) for scale in scales]
        return scales[int(torch.stack(losses).argmin())]


def weight_share(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Mean over outputs of |weight| as a share of its group's largest, [K]; weight [N, K]."""
    total = torch.zeros(weight.shape[1], device=weight.device)
    for rows in row_blocks(*weight.shape):
        groups = grid.grouped(weight[rows].abs())
        total += (groups / groups.amax(2, keepdim=True).clamp(min=1e-6)).flatten(1).sum(0)
    return total / weight.shape[0]


def candidate(absmean: torch.Tensor, share: torch.Tensor | None, ratio: float) -> torch.Tensor:
    """s [K] of a grid point: absmean^ratio, divided by share^(1 − ratio) with duo scaling, then balanced."""
    scale = absmean**ratio if share is None else absmean**ratio / (share ** (1 - ratio) + 1e-4)
    alive = absmean > 0
    scale = torch.where(alive, scale, torch.ones_like(scale)).clamp(min=1e-4)
    return scale / (scale.max() * scale.min()).sqrt()


def rounding_loss(weight: torch.Tensor, scale: torch.Tensor, gram: torch.Tensor, grid: Grid) -> torch.Tensor:
    """tr(ΔW·G·ΔWᵀ), ΔW = Q(W·diag(s))·diag(s)⁻¹ − W: the outputs' mean squared error, a number on weight's device."""
    total = torch.zeros((), device=weight.device)
    for rows in row_blocks(*weight.shape):
        part = weight[rows]
        total += row_errors(grid.quantize(part * scale).dequantize() / scale - part, gram).sum()
    return total
