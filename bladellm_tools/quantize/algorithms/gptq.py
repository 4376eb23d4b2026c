"""GPTQ: round column by column, spreading each error over the columns still to come."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bladellm_runtime.quantization.weight import QuantizedWeight
from bladellm_tools.quantize.algorithms.algorithm import Rounded
from bladellm_tools.quantize.algorithms.gptq_solver import Columns, solve
from bladellm_tools.quantize.algorithms.grid import Grid
from bladellm_tools.quantize.algorithms.hessian import factorise
from bladellm_tools.quantize.algorithms.precision import matmul_precision
from bladellm_tools.quantize.algorithms.statistics import InputStatistics

NO_FACTOR = "rounded to nearest: the inputs of calibration are all 0 or not finite"


@dataclass(frozen=True, slots=True)
class Gptq:
    """A `Rounder` after Frantar et al. 2023, "GPTQ", arXiv:2210.17323.

    With H the Hessian of the output error (the Gram matrix of the inputs, `damp` of its mean diagonal added) and
    H⁻¹ = Uᵀ·U, column i is rounded to q, and the error (w_i − q) / U_ii · U_ij is taken from every later column j.

    desc_act: columns are rounded by descending diagonal of H (act-order). static_groups: then the scales of groups are
    taken from the weight before, by the natural order; without, groups are formed in the rounding order, and the
    results have an `order`. Without desc_act a group's scale is taken when the rounding gets to it. search_range:
    every range is shrunk to where its plain rounding has the least error weighted with the diagonal of H. block:
    columns rounded before their errors are spread over the rest; it changes speed only.
    """

    grid: Grid
    damp: float = 0.01
    desc_act: bool = True
    static_groups: bool = True
    search_range: bool = True
    block: int = 128

    def __call__(
        self, modules: Sequence[str], weights: Sequence[torch.Tensor], statistics: InputStatistics | None
    ) -> list[Rounded]:
        """As `Rounder`: one factorisation and one pass serve all weights. Raises ValueError without statistics."""
        if statistics is None:
            raise ValueError(f"GPTQ needs the inputs of {', '.join(modules)}")
        with matmul_precision("highest"):
            columns = self._columns(statistics.gram.diagonal())
            factor = factorise(statistics.gram, self.damp, columns.order)
            if factor is None:
                return [Rounded(self.grid.quantize(weight), note=NO_FACTOR) for weight in weights]
            stacked = torch.cat(list(weights))
            stacked[:, statistics.gram.diagonal() <= 0] = 0
            importance = statistics.gram.diagonal() if self.search_range else None
            solved = solve(stacked, factor.upper, self.grid, columns, self.block, importance)
        return [Rounded(part, damp=factor.damp) for part in _split(self._ordered(solved, columns.order), weights)]

    @property
    def _scrambles(self) -> bool:
        return self.desc_act and not self.static_groups and self.grid.scheme.group_size is not None

    def _columns(self, diagonal: torch.Tensor) -> Columns:
        natural = torch.arange(len(diagonal), device=diagonal.device)
        order = diagonal.sort(descending=True, stable=True).indices if self.desc_act else natural
        size = self.grid.scheme.group_size or len(diagonal)
        groups = (natural if self._scrambles else order) // size
        return Columns(order, groups, fixed=self.desc_act and self.static_groups)

    def _ordered(self, solved: QuantizedWeight, order: torch.Tensor) -> QuantizedWeight:
        """The columns of the codes in the order of the inputs, or with the order they are in."""
        if self._scrambles:
            return replace(solved, order=order)
        codes = torch.empty_like(solved.codes)
        codes[:, order] = solved.codes
        return replace(solved, codes=codes)


def _split(solved: QuantizedWeight, weights: Sequence[torch.Tensor]) -> list[QuantizedWeight]:
    rows = [len(weight) for weight in weights]
    parts = zip(solved.codes.split(rows), solved.scales.split(rows), strict=True)
    zeros = [None] * len(rows) if solved.zeros is None else solved.zeros.split(rows)
    return [
        replace(solved, codes=codes, scales=scales, zeros=each)
        for (codes, scales), each in zip(parts, zeros, strict=True)
    ]
