"""SmoothQuant: move the outliers of activations into the weights before both are rounded (arXiv 2211.10438).

Equation 4: s_j = max|X_j|^α / max|W_j|^(1 − α) for input channel j, the maximum of |W| over the rows of all linear
layers that read the input. α = 1 takes all of an outlier into the weights, α = 0 none.
"""

from dataclasses import dataclass

import torch

from bladellm_tools.quantize.algorithms.statistics import InputStatistics

LEAST = 1e-5


@dataclass(frozen=True, slots=True)
class SmoothQuant:
    """The paper's formula. Channels that are never active, or that no weight reads, keep s = 1."""

    alpha: float

    def __call__(self, group: str, weights: list[torch.Tensor], statistics: InputStatistics) -> torch.Tensor:
        return smoothing(weights, statistics.absmax, self.alpha)


def smoothing(weights: list[torch.Tensor], absmax: torch.Tensor, alpha: float) -> torch.Tensor:
    """s [K] of weights [N_i, K] and the inputs' largest magnitudes absmax [K]; both are floored at 1e-5."""
    largest = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0)
    scale = absmax.clamp(min=LEAST) ** alpha / largest.clamp(min=LEAST) ** (1 - alpha)
    alive = (absmax > 0) & (largest > 0) & torch.isfinite(scale)
    return torch.where(alive, scale.clamp(min=LEAST), torch.ones_like(scale))
