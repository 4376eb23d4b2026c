"""RMS normalisation whose division comes after the next linear layer: `norm(x) · Wᵀ = factor · ((x · w) · Wᵀ)`.

The factor of a row needs all of it, but the layer in front writes a row by many programs. So they leave the sums of
squares of their parts, and `x · w`, and the layer behind multiplies its float32 sums by the factor: no kernel in
between. The operators that take and give such norms are in `normed_linear`.
"""

from dataclasses import dataclass

import torch

from bladellm_kernels.has_triton import has_triton


@dataclass(frozen=True, slots=True)
class DelayedNorm:
    """The RMS norm of x [M, H] in two parts.

    weighted: x · weight, [M, H] of x's type, float32, bfloat16 or float16 (of which x · weight must be in the range).
    squares: float32 [M, P], sums of x² over P disjoint parts of a row. Both are contiguous. eps: added to the mean of
    the squares.
    """

    weighted: torch.Tensor
    squares: torch.Tensor
    eps: float

    def factors(self) -> torch.Tensor:
        """What `weighted` is multiplied by: `1 / sqrt(mean(x²) + eps)`, float32 [M]."""
        return torch.rsqrt(self.squares.sum(1) / self.weighted.shape[1] + self.eps)

    def normed(self) -> torch.Tensor:
        """The norm itself, [M, H] of weighted's type. One kernel on CUDA where triton is installed."""
        if self.weighted.is_cuda and has_triton():
            from bladellm_kernels.delayed_norm_triton import launch_normed

            out = torch.empty_like(self.weighted)
            launch_normed(self.weighted, self.squares, self.eps, out)
            return out
        return (self.weighted * self.factors()[:, None]).to(self.weighted.dtype)


def delayed_norm(x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> DelayedNorm:
    """The norm of rows that no linear layer wrote: those of the embedding.

    One kernel on CUDA where triton is installed. x: [M, H]; norm_weight: [H] of its type and device. The squares have
    one part. Raises ValueError naming the
    argument that is wrong.
    """
    check_norm_weight(norm_weight, x)
    if not (x.is_cuda and has_triton() and x.stride(1) == norm_weight.stride(0) == 1):
        return DelayedNorm(x * norm_weight, x.float().square().sum(1, keepdim=True), eps)
    from bladellm_kernels.delayed_norm_triton import launch_delayed_norm

    weighted = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    squares = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    launch_delayed_norm(x, norm_weight, weighted, squares)
    return DelayedNorm(weighted, squares, eps)


def check_norm_weight(norm_weight: torch.Tensor, x: torch.Tensor) -> None:
    """x: [M, H]. Raises ValueError where the weight of its norm is not [H] of its type, on its device."""
    if x.ndim != 2:
        raise ValueError(f"x must be [M, H], got {list(x.shape)}")
    expected, found = (x.shape[1:], x.dtype, x.device), (norm_weight.shape, norm_weight.dtype, norm_weight.device)
    if found != expected:
        raise ValueError(f"norm_weight must be {x.dtype} {list(x.shape[1:])} on {x.device}, got {found}")
