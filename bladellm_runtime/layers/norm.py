"""RMS normalisation with its weight."""

import torch
from bladellm_kernels.rms_norm import add_rms_norm, gather_add_rms_norm, rms_norm


class RmsNorm:
    """Normalises the last dimension; weight [N]."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] -> normed [..., N]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor | None, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual stream, in place, and normalise it; without a residual yet, x is the stream, and
        without an x it has been added.

        Returns (normed, residual), both of the stream's shape.
        """
        stream = x if residual is None else residual
        assert stream is not None
        if x is None or residual is None:
            return rms_norm(stream, self.weight, self.eps), stream
        return add_rms_norm(x, residual, self.weight, self.eps, total=residual)

    def gather(self, x: torch.Tensor, residual: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
        """The normed sum in the rows `index`, int64 [R], alone: x, residual [T, N] -> [R, N]."""
        return gather_add_rms_norm(x, residual, index, self.weight, self.eps)
