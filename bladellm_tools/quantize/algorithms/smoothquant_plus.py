"""SmoothQuant+: smooth before group-wise weight rounding, as hard as suits the whole model (arXiv 2312.03788).

Outliers of activations multiply the rounding errors of the weights they meet, so SmoothQuant's s (equation 4 of arXiv
2211.10438) is folded in before 4-bit weights are rounded, activations staying as they are. One α serves all layers. It
is searched over 0, 0.05 … 1 by the loss of the whole quantized model: every layer reads what the quantized layers
before it made, so errors add up as they do in use. α = None, no smoothing, is a candidate too. As in the paper the
candidates are rounded plainly, whatever rounds the weights afterwards.

The search passes over the layers once: it carries one stream of hidden states per candidate beside the float model's,
so a layer is read once whatever the number of candidates. Memory: (candidates + 1) · hidden, and one layer twice.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from bladellm_tools.quantize.algorithms.fold import Heads, can_fold, fold
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.layer import GROUPS, LayerWeights
from bladellm_tools.quantize.algorithms.smoothquant import smoothing
from bladellm_tools.quantize.algorithms.statistics import InputStatistics

ALPHAS = tuple(step / 20 for step in range(21))

Forward = Callable[[int, LayerWeights, torch.Tensor], torch.Tensor]
"""(layer's index, its weights, hidden [S, T, H]) -> hidden after the layer."""
Collect = Callable[[int, LayerWeights, torch.Tensor], dict[str, InputStatistics]]
"""(layer's index, its weights, hidden [S, T, H]) -> statistics of the inputs, by group."""
Head = Callable[[torch.Tensor], torch.Tensor]
"""hidden [T, H] after the last layer -> logits [T, V]."""


@dataclass(frozen=True, slots=True)
class SmoothQuantPlus:
    """Smooths by the α that `search_alpha` found; None leaves every input as it is."""

    alpha: float | None

    def __call__(self, group: str, weights: list[torch.Tensor], statistics: InputStatistics) -> torch.Tensor:
        if self.alpha is None:
            return torch.ones_like(statistics.absmax)
        return smoothing(weights, statistics.absmax, self.alpha)


@dataclass(frozen=True, slots=True)
class AlphaSearch:
    """The candidate with the least loss, and every candidate's; ties go to the earlier: None, then the smallest α."""

    best: float | None
    losses: dict[float | None, float]


def search_alpha(
    layers: Iterable[tuple[int, LayerWeights]],
    hidden: torch.Tensor,
    forward: Forward,
    collect: Collect,
    grid: Grid,
    heads: Heads,
    head: Head | None = None,
    alphas: Sequence[float] = ALPHAS,
) -> AlphaSearch:
    """Find α on hidden [S, T, H], the embedded calibration windows. `forward` and `collect` take weights of any type.

    With `head` the loss is the mean KL divergence of the quantized model's logits from the float model's; without, the
    sum over layers of the squared difference of their outputs, as a share of plain rounding's.
    """
    streams: dict[float | None, torch.Tensor] = dict.fromkeys((None, *alphas), hidden)
    losses: dict[float | None, float] = dict.fromkeys(streams, 0.0)
    exact = hidden
    for index, layer in layers:
        statistics = collect(index, layer, exact)
        exact = forward(index, layer, exact)
        errors = {}
        for alpha in streams:
            streams[alpha] = forward(index, rounded_layer(layer, statistics, alpha, grid, heads), streams[alpha])
            errors[alpha] = squared_difference(streams[alpha], exact)
        for alpha, error in errors.items():
            losses[alpha] += error / errors[None] if errors[None] else error
    if head is not None:
        losses = {alpha: divergence(stream, exact, head) for alpha, stream in streams.items()}
    return AlphaSearch(min(losses, key=losses.__getitem__), losses)


def rounded_layer(
    layer: LayerWeights, statistics: dict[str, InputStatistics], alpha: float | None, grid: Grid, heads: Heads
) -> LayerWeights:
    """The layer smoothed by alpha wherever its inputs can be divided, then its linear layers rounded; dequantized."""
    smoother = SmoothQuantPlus(alpha)
    for group in GROUPS:
        if alpha is not None and can_fold(layer, group, heads):
            weights = [layer[f"{member}.weight"].float() for member in group.members]
            layer, _ = fold(layer, group, smoother(group.name, weights, statistics[group.name]), heads)
    rounded = dict(layer)
    for member in (f"{member}.weight" for group in GROUPS for member in group.members):
        rounded[member] = grid.quantize(layer[member].float()).dequantize()
    return rounded


def squared_difference(hidden: torch.Tensor, exact: torch.Tensor) -> float:
    """Sum of squared differences, a sample at a time to spare memory."""
    return sum(float((one.float() - other.float()).square().sum()) for one, other in zip(hidden, exact, strict=True))


def divergence(hidden: torch.Tensor, exact: torch.Tensor, head: Head) -> float:
    """Mean over tokens of KL(float ‖ quantized), in nats, of hidden states after the last layer, [S, T, H]."""
    total = 0.0
    for one, other in zip(hidden, exact, strict=True):
        logs, expected = head(one).float().log_softmax(-1), head(other).float().log_softmax(-1)
        total += float((expected.exp() * (expected - logs)).sum())
    return total / (hidden.shape[0] * hidden.shape[1])
