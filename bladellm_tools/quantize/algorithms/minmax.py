"""Plain rounding to the nearest code, the range of every group spanned from its least to its greatest weight."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bladellm_tools.quantize.algorithms.algorithm import Rounded
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.statistics import InputStatistics


@dataclass(frozen=True, slots=True)
class MinMax:
    """Rounds every weight to its nearest code, the module and its inputs unseen."""

    grid: Grid

    def __call__(
        self, modules: Sequence[str], weights: Sequence[torch.Tensor], statistics: InputStatistics | None
    ) -> list[Rounded]:
        return [Rounded(self.grid.quantize(weight)) for weight in weights]
