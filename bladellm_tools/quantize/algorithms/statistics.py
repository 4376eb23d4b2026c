"""What calibration keeps of a linear layer's input: one pass over the data serves every algorithm."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class InputStatistics:
    """Of the inputs x [tokens, K] of one group of linear layers, all float32 on one device.

    gram: [K, K], the mean of x·xᵀ (half of GPTQ's Hessian). absmax, absmean: [K], of |x|. tokens: how many.
    """

    gram: torch.Tensor
    absmax: torch.Tensor
    absmean: torch.Tensor
    tokens: int

    def divided(self, scale: torch.Tensor) -> "InputStatistics":
        """The statistics after every input channel has been divided by scale [K]."""
        inverse = scale.reciprocal()
        gram = self.gram * inverse.unsqueeze(0) * inverse.unsqueeze(1)
        return InputStatistics(gram, self.absmax * inverse, self.absmean * inverse, self.tokens)

    def output_error(self, weight: torch.Tensor, rounded: torch.Tensor) -> float:
        """Mean squared error of the outputs, as a share of their mean square: tr(ΔW·H·ΔWᵀ) / tr(W·H·Wᵀ).

        weight, rounded: float32 [N, K]. 0 where the outputs are 0.
        """
        difference = rounded - weight
        error = ((difference @ self.gram) * difference).sum()
        power = ((weight @ self.gram) * weight).sum()
        return float(error / power) if power > 0 else 0.0
