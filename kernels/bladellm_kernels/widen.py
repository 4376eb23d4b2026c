"""Widening to float32: the head's logits, as samplers read them."""

import torch

from bladellm_kernels.has_triton import has_triton


def widen(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x as float32.

    x: [..., N], contiguous, float32, bfloat16 or float16; out: float32 of its shape, contiguous. Returns out, x
    itself where it is float32 and no out is given, or a new tensor. On CUDA one kernel where triton is installed.
    """
    if x.dtype == torch.float32 or not (x.is_cuda and has_triton() and x.is_contiguous()):
        return x.float() if out is None else out.copy_(x)
    from bladellm_kernels.widen_triton import launch_widen

    out = torch.empty(x.shape, dtype=torch.float32, device=x.device) if out is None else out
    launch_widen(x, out)
    return out
