"""Linear layers with the RMS norm in front, or the residual addition and an RMS norm behind, each as one kernel.

A decoder layer is `normed_linear` (QKV), rotary embedding and attention, `linear_add` (o), `normed_linear_silu_mul`
(gate and up), `linear_add` (down); `delayed_norm` says what they hand on.
"""

import torch

from bladellm_kernels.delayed_norm import DelayedNorm, check_norm_weight, delayed_norm
from bladellm_kernels.linear import linear, linear_silu_mul


def normed_linear(
    norm: DelayedNorm, weight: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`norm(x) · weightᵀ + bias`.

    norm: of [M, K]; weight: [N, K]; bias: [N]; all of one floating-point type and device. out: [M, N] of that type or
    float32. Returns it, or a new tensor of that type. Raises ValueError naming the argument that is wrong.
    """
    if out is not None and out.dtype == torch.float32 != weight.dtype:
        y = linear(norm.normed().float(), weight.float(), None if bias is None else bias.float())
        return out.copy_(y)
    return linear(norm.normed(), weight, bias, out)


def normed_linear_silu_mul(norm: DelayedNorm, weight: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`silu(gate) · up` of `norm(x) · weightᵀ`.

    norm: of [M, K]; weight: [2·N, K], the gate's rows first; one floating-point type and device. out: [M, N] to write
    to. Returns it, or a new tensor. Raises ValueError naming the argument that is wrong.
    """
    return linear_silu_mul(norm.normed(), weight, out)


def linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, DelayedNorm]:
    """The residual stream after a layer, `residual + x · weightᵀ + bias`, and its norm by the next layer's weight.

    x: [M, K]; weight: [N, K]; residual: [M, N]; norm_weight: [N]; bias: [N]; all of one floating-point type and device.
    out: [M, N] that the stream is written to, may be residual. Returns the stream, out or a new tensor, and the norm,
    of the stream as it was rounded. Raises ValueError naming the argument that is wrong.
    """
    check_norm_weight(norm_weight, residual)
    stream = linear(x, weight, bias, out, residual)
    return stream, delayed_norm(stream, norm_weight, eps)
