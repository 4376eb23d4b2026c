"""`InputStatistics` of a decoder layer's groups, summed over batches on each device, then over the devices."""

from collections.abc import Collection, Sequence

import torch

from bladellm_tools.quantize.algorithms.statistics import InputStatistics

SAMPLE_TOKENS = 2048
"""Inputs kept as they are, for errors that no Gram matrix knows: those of rounded activations."""


class _Sums:
    """Of the inputs of one group on one device, float32."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.gram = torch.zeros(columns, columns, device=device)
        self.absmax = torch.zeros(columns, device=device)
        self.abs = torch.zeros(columns, device=device)
        self.tokens = 0
        self.sample: torch.Tensor | None = None

    def add(self, x: torch.Tensor) -> None:
        self.gram.add_(_gram(x))
        size = x.abs()
        self.absmax = torch.maximum(self.absmax, size.amax(0).float())
        self.abs += size.sum(0, dtype=torch.float32)
        self.tokens += x.shape[0]

    def merge(self, other: "_Sums") -> None:
        device = self.gram.device
        self.gram.add_(other.gram.to(device))
        self.absmax = torch.maximum(self.absmax, other.absmax.to(device))
        self.abs += other.abs.to(device)
        self.tokens += other.tokens

    def finish(self) -> InputStatistics:
        """The sums as means; the Gram matrix is divided in place, the largest thing there is here."""
        return InputStatistics(self.gram.div_(self.tokens), self.absmax, self.abs / self.tokens, self.tokens)


class Collector:
    """An observer of `forward_layer` on one device that keeps what `groups` read.

    `sampled`: keep the first `SAMPLE_TOKENS` inputs too.
    """

    def __init__(self, groups: Collection[str], sampled: bool = False) -> None:
        self.groups = groups
        self.sampled = sampled
        self._sums: dict[str, _Sums] = {}

    def __call__(self, name: str, x: torch.Tensor) -> None:
        """x [tokens, K]: more inputs of group `name`; what is not one of `groups` is passed over."""
        if name not in self.groups:
            return
        if name not in self._sums:
            self._sums[name] = _Sums(x.shape[1], x.device)
            if self.sampled:
                self._sums[name].sample = x[:SAMPLE_TOKENS].clone()
        self._sums[name].add(x)

    def sums(self) -> dict[str, _Sums]:
        return self._sums


def statistics_of(collectors: Sequence[Collector]) -> dict[str, InputStatistics]:
    """The statistics of each group over the inputs of all collectors, on the first one's device. Uses them up."""
    first = collectors[0].sums()
    for other in collectors[1:]:
        for name, sums in other.sums().items():
            first[name].merge(sums)
    return {name: sums.finish() for name, sums in first.items()}


def samples_of(collectors: Sequence[Collector]) -> dict[str, torch.Tensor]:
    """The inputs the first collector kept, by group, [tokens, K] of the activations' type."""
    return {name: sums.sample for name, sums in collectors[0].sums().items() if sums.sample is not None}


def _gram(x: torch.Tensor) -> torch.Tensor:
    """xᵀ·x, float32 [K, K]. Products of 16-bit numbers are exact in float32, so 16-bit inputs lose nothing."""
    if x.dtype != torch.float32 and x.device.type == "cuda":
        return torch.mm(x.t(), x, out_dtype=torch.float32)
    wide = x.float()
    return wide.t() @ wide
