"""RMS normalisation with its weight."""

import torch
from bladellm_kernels.rms_norm import add_rms_norm, gather_add_rms_norm, rms_norm


class RmsNorm:
    """Normalises the last dimension; weight [N]. rows: those normalised alone, int64 [R]; None for all."""

    rows: torch.Tensor | None = None

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., N] -> normed [..., N]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual stream, in place, and normalise it; without a residual yet, x is the stream.

        Returns (normed, residual), both of x's shape.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps, total=residual)

    def of(self, rows: torch.Tensor | None) -> "RmsNorm":
        """This norm in `rows`, int64 [R], alone; itself for None, all rows."""
        return self if rows is None else RowsRmsNorm(self.weight, self.eps, rows)


class RowsRmsNorm(RmsNorm):
    """The norm of a stream that ends here, in a few rows: those of tokens whose logits are wanted."""

    rows: torch.Tensor

    def __init__(self, weight: torch.Tensor, eps: float, rows: torch.Tensor) -> None:
        super().__init__(weight, eps)
        self.rows = rows

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The normed sum in the rows, [R, N], and the stream [T, N] as it was: nothing more will be added to it."""
        normed = gather_add_rms_norm(x, residual, self.rows, self.weight, self.eps)
        return normed, x if residual is None else residual
