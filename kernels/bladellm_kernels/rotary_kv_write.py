"""Normalise and rotate queries and keys, store keys and values: what attention does before it attends."""

from dataclasses import dataclass

import torch

from bladellm_kernels.hadamard import hadamard
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_write import check_kv_write, kv_write_by_operators, kv_write_reference
from bladellm_kernels.rms_norm import rms_norm, rms_norm_reference
from bladellm_kernels.rotary import rotary


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each query head and each key head before the rotation: weights [D] of their type, contiguous."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def rotary_kv_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KvLayer,
    rows: torch.Tensor,
    granule_rows: torch.Tensor | None = None,
    *,
    norms: HeadNorms | None = None,
    rotate: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    keep_keys: bool = False,
) -> torch.Tensor:
    """`rms_norm` (given `norms`) and `rotary` of q and k, then `kv_write` of k and v.

    q: [T, Hq, D]; k, v: [T, Hk, D]; all of one float type, any strides but the last, which is 1, such as views of one
    qkv; D even. cos, sin: float32 [T, 1, D] of `rotary_tables`. kv, rows, granule_rows: as in `kv_write`. rotate:
    `hadamard_matrix(D)` of q's type, to turn q and k by `hadamard` after rotary: scores stay, and fewer codes hold k.
    out: [T, Hq, D] of q's type, may be q itself. keep_keys: the turned keys are written to k, too. Returns the rotated
    q, [T, Hq, D]: `out`, or a new tensor. On CUDA one kernel where triton is installed.
    """
    granule_rows = check_kv_write(kv, rows, k, v, granule_rows)
    _check(q, k, cos, sin, norms, rotate, out)
    if q.is_cuda and has_triton():
        from bladellm_kernels.kv_write_triton import launch_rotary_kv_write

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        launch_rotary_kv_write(q, k, v, norms, cos, sin, kv, rows, granule_rows, rotate, out, keep_keys)
        return out
    given = k
    q, k = _normed(q, k, norms)
    turned_q, turned_k = _turned(q, cos, sin, rotate), _turned(k, cos, sin, rotate)
    if keep_keys:
        given.copy_(turned_k)
    kv_write_by_operators(kv, rows, turned_k, v, granule_rows)
    return turned_q if out is None else out.copy_(turned_q)


def rotary_kv_write_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KvLayer,
    rows: torch.Tensor,
    granule_rows: torch.Tensor | None = None,
    *,
    norms: HeadNorms | None = None,
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rotary_kv_write` by its parts, each rounded to the type of its inputs."""
    if norms is not None:
        q = rms_norm_reference(q, norms.q_weight, norms.eps).to(q.dtype)
        k = rms_norm_reference(k, norms.k_weight, norms.eps).to(k.dtype)
    kv_write_reference(kv, rows, _turned(k, cos, sin, rotate), v, granule_rows)
    return _turned(q, cos, sin, rotate)


def _normed(q: torch.Tensor, k: torch.Tensor, norms: HeadNorms | None) -> tuple[torch.Tensor, torch.Tensor]:
    if norms is None:
        return q, k
    return rms_norm(q, norms.q_weight, norms.eps), rms_norm(k, norms.k_weight, norms.eps)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate: torch.Tensor | None) -> torch.Tensor:
    turned = rotary(x, cos, sin)
    return turned if rotate is None else hadamard(turned, rotate)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    rotate: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    out = q if out is None else out
    tokens, _, dim = q.shape
    if tokens != k.shape[0] or dim != k.shape[2] or dim % 2 or not q.dtype == k.dtype == out.dtype:
        raise ValueError(
            f"q {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype} and out {out.dtype} must have the same tokens, "
            "type and even head size"
        )
    if out is not q and out.shape != q.shape:
        raise ValueError(f"out must have q's shape {list(q.shape)}, got {list(out.shape)}")
    if cos.shape != (tokens, 1, dim) or sin.shape != cos.shape or not cos.dtype == sin.dtype == torch.float32:
        raise ValueError(f"cos and sin must be float32 [{tokens}, 1, {dim}], got {list(cos.shape)}, {list(sin.shape)}")
    if cos.stride() != sin.stride():
        raise ValueError(f"cos and sin must have the same strides, got {cos.stride()} and {sin.stride()}")
    if norms is not None:
        _check_norms(norms, dim, q.dtype)
    if rotate is not None and (rotate.shape != (dim, dim) or rotate.dtype != q.dtype or rotate.stride(1) != 1):
        raise ValueError(f"rotate must be {q.dtype} [{dim}, {dim}], got {rotate.dtype} {list(rotate.shape)}")
    if q.stride(2) != 1 or out.stride(2) != 1 or cos.stride(2) != 1:
        raise ValueError("the last dimension of q, out, cos and sin must be contiguous, their last stride 1")


def _check_norms(norms: HeadNorms, dim: int, dtype: torch.dtype) -> None:
    for name, weight in (("q_weight", norms.q_weight), ("k_weight", norms.k_weight)):
        if weight.shape != (dim,) or weight.dtype != dtype or weight.stride(0) != 1:
            raise ValueError(f"{name} must be {dtype} [{dim}], got {weight.dtype} {list(weight.shape)}")
