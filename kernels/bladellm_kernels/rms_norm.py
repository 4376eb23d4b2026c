"""RMS normalisation (Zhang and Sennrich 2019, arXiv:1910.07467): alone, after the residual addition, of gathered rows,
and with its result rounded to 8 bits for linears that take such activations.

On CUDA each is one kernel for [T, N] whose last stride is 1, where triton is installed; PyTorch's operators otherwise.
"""

import torch
import torch.nn.functional as F

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.row_codes import check_code_type, row_codes


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension.

    x: [..., N]; weight: [N] of its type: float32, bfloat16 or float16. The mean is taken in float32. out: [..., N] of
    x's type, may be x. Returns [..., N].
    """
    _check(x, weight)
    if not _one_kernel(x, weight, out):
        return _into(out, F.rms_norm(x, weight.shape, weight, eps))
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    launch_rms_norm(x, None, weight, None, eps, out)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream, then normalise the sum.

    x, residual: [..., N]; weight: [N]. out, total: where the two results go, [..., N]; each may be x or residual.
    Returns (normed, residual + x) of x's shape and type, inputs unchanged unless given as results.
    """
    _check(x, weight, residual)
    if not _one_kernel(x, weight, residual, out, total):
        total = torch.add(residual, x) if total is None else torch.add(residual, x, out=total)
        return _into(out, F.rms_norm(total, weight.shape, weight, eps)), total
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if total is None else total
    launch_rms_norm(x, residual, weight, None, eps, out, total)
    return out, total


def gather_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    index: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The normed sum of `add_rms_norm` in the rows `index` alone: the final norm, of the tokens whose logits count.

    x, residual: [T, N], no residual for 0; index: int64 [R], each in [0, T); weight: [N]. out: [R, N] of x's type.
    Returns [R, N].
    """
    _check(x, weight, x if residual is None else residual)
    if not _one_kernel(x, weight, residual, out):
        rows = x.index_select(0, index)
        rows = rows if residual is None else rows.add_(residual.index_select(0, index))
        return _into(out, F.rms_norm(rows, weight.shape, weight, eps))
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    out = torch.empty(len(index), x.shape[1], dtype=x.dtype, device=x.device) if out is None else out
    launch_rms_norm(x, residual, weight, index, eps, out)
    return out


def rms_norm_quant(
    x: torch.Tensor, weight: torch.Tensor, eps: float, code_type: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """`row_codes` of `rms_norm`. x: [..., N]; code_type: torch.int8 or torch.float8_e4m3fn.

    Returns codes [..., N] and scales, float32 [..., 1].
    """
    _check(x, weight)
    largest = check_code_type(code_type)
    if not _one_kernel(x, weight):
        return row_codes(F.rms_norm(x, weight.shape, weight, eps), code_type)
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    codes, scales = _empty_codes(x, code_type)
    launch_rms_norm(x, None, weight, None, eps, codes, None, scales, largest)
    return codes, scales


def add_rms_norm_quant(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    code_type: torch.dtype,
    *,
    total: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`row_codes` of the normed sum of `add_rms_norm`, and the sum; arguments as there and in `rms_norm_quant`.

    Returns codes [..., N], scales, float32 [..., 1], and residual + x [..., N].
    """
    _check(x, weight, residual)
    largest = check_code_type(code_type)
    if not _one_kernel(x, weight, residual, total):
        normed, total = add_rms_norm(x, residual, weight, eps, total=total)
        return *row_codes(normed, code_type), total
    from bladellm_kernels.rms_norm_triton import launch_rms_norm

    codes, scales = _empty_codes(x, code_type)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if total is None else total
    launch_rms_norm(x, residual, weight, None, eps, codes, total, scales, largest)
    return codes, scales, total


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


def _one_kernel(x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the kernel takes tensors of these strides, all but the weight [rows, N]."""
    if not (x.is_cuda and has_triton() and x.dim() == 2 and x.stride(1) == 1 and weight.stride(0) == 1):
        return False
    return all(other is None or other.stride(1) == 1 for other in others)


def _check(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None) -> None:
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(f"weight must be {x.dtype} {list(x.shape[-1:])}, got {weight.dtype} {list(weight.shape)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(f"residual must be {x.dtype} {list(x.shape)}, got {residual.dtype} {list(residual.shape)}")


def _empty_codes(x: torch.Tensor, code_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(x.shape, dtype=code_type, device=x.device)
    return codes, torch.empty(*x.shape[:-1], 1, dtype=torch.float32, device=x.device)


def _into(out: torch.Tensor | None, result: torch.Tensor) -> torch.Tensor:
    return result if out is None else out.copy_(result)
