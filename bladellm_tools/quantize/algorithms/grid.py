"""`Grid`: the values a weight may take, from its range to its codes; shared by every algorithm.

Symmetric: scale = absmax / ((2^bits − 1) / 2), zero point 2^(bits − 1), as GPTQ has it. Asymmetric:
scale = (max − min) / (2^bits − 1), zero = round(−min / scale), the range widened to hold 0. fp8: scale = absmax / 448.
Scales are rounded to the type they are stored in first, so that codes fit the scales a server will read.
"""

from dataclasses import dataclass

import torch

from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight

FP8_MAX = 448.0


@dataclass(frozen=True, slots=True)
class Grid:
    """A scheme with the type of its scales. `lowest_zero`: the least zero point the checkpoint format can hold."""

    scheme: Scheme
    scale_dtype: torch.dtype
    lowest_zero: int = 0

    def grouped(self, weight: torch.Tensor) -> torch.Tensor:
        """weight [N, K] as [N, G, K / G]."""
        return weight.view(weight.shape[0], self.scheme.groups(weight.shape[1]), -1)

    def ranges(
        self, weight: torch.Tensor, shrink: torch.Tensor | float = 1.0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales [N, G] and zero points (uint8 [N, G], None when symmetric) that span weight, float32 [N, K].

        `shrink` (a number, or [N, G]) narrows the range before: weights outside saturate.
        """
        groups = self.grouped(weight)
        if self.scheme.kind == "fp8" or self.scheme.symmetric:
            steps = FP8_MAX if self.scheme.kind == "fp8" else (self.scheme.levels - 1) / 2
            return self._stored(groups.abs().amax(2) * shrink / steps), None
        low, high = groups.amin(2).clamp(max=0) * shrink, groups.amax(2).clamp(min=0) * shrink
        scales = self._stored((high - low) / (self.scheme.levels - 1))
        zeros = (-low / scales.float()).round().clamp(self.lowest_zero, self.scheme.levels - 1)
        return scales, zeros.to(torch.uint8)

    def codes(self, weight: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """The nearest codes, [N, K] of the scheme's code type, of weight, float32 [N, K]."""
        steps = self.grouped(weight) / scales.float().unsqueeze(2)
        if self.scheme.kind == "fp8":
            return steps.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(weight.shape)
        middle = self.scheme.middle if zeros is None else zeros.float().unsqueeze(2)
        return (steps.round() + middle).clamp(0, self.scheme.levels - 1).to(torch.uint8).view(weight.shape)

    def quantize(self, weight: torch.Tensor, shrink: torch.Tensor | float = 1.0) -> QuantizedWeight:
        """Plain rounding to the nearest code of weight, float32 [N, K]."""
        scales, zeros = self.ranges(weight, shrink)
        return QuantizedWeight(self.scheme, self.codes(weight, scales, zeros), scales, zeros)

    def _stored(self, scales: torch.Tensor) -> torch.Tensor:
        return scales.clamp(min=torch.finfo(self.scale_dtype).tiny).to(self.scale_dtype)
