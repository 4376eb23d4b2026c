"""`Algorithm`: a way to smooth the inputs of a layer, then a way to round its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from bladellm_runtime.quantization.weight import QuantizedWeight
from bladellm_tools.quantize.algorithms.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight and what its report should say: the damping GPTQ used, why it fell back to plain rounding."""

    weight: QuantizedWeight
    damp: float | None = None
    note: str | None = None


class Smoother(Protocol):
    """Finds s [K], float32, positive: inputs are divided by it, the columns of every member's weight multiplied."""

    def __call__(self, group: str, weights: list[torch.Tensor], statistics: InputStatistics) -> torch.Tensor:
        """weights: float32 [N_i, K] of the group's members, in the order of `LinearGroup.members`."""


class Rounder(Protocol):
    """Rounds the weights of linear layers that read the same input to their scheme."""

    def __call__(
        self, modules: Sequence[str], weights: Sequence[torch.Tensor], statistics: InputStatistics | None
    ) -> list[Rounded]:
        """modules: names within their decoder layer (`self_attn.q_proj`); weights: float32 [N_i, K], one a module;
        statistics: of their input, None only for algorithms that need none."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`smoothed`: names of the groups the smoother is asked about; those whose producer cannot take it are left out."""

    name: str
    rounder: Rounder
    needs_statistics: bool
    smoother: Smoother | None = None
    smoothed: frozenset[str] = field(default_factory=frozenset)
