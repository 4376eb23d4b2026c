"""RMS normalisation with its weight."""

import torch
from bladellm_kernels.rms_norm import add_rms_norm, rms_norm


class RmsNorm:
    """Normalises the last dimension; weight [N]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] -> normed [..., N]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual stream and normalise it; without a residual yet, x is the stream.

        Returns (normed, residual), both of x's shape.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
