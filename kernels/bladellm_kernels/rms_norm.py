"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467), alone and with the residual addition before it."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension.

    x: [..., N]; weight: [N] of its type: float32, bfloat16 or float16. The mean is taken in float32. Returns [..., N].
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream, then normalise the sum.

    x, residual: [..., N]; weight: [N]. Returns (normed, residual + x) of x's shape and type, inputs unchanged.
    """
    residual = residual + x
    return rms_norm(residual, weight, eps), residual


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` written out in float32. Returns float32."""
    wide = x.float()
    return wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` written out in float32. Returns float32."""
    total = x.float() + residual.float()
    return rms_norm_reference(total, weight, eps), total
