"""Rotate queries and keys and store keys and values: what attention does before it attends, in one operator."""

from importlib.util import find_spec

import torch

from bladellm_kernels.hadamard import hadamard
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_write import check_kv_write, kv_write_by_operators, kv_write_reference
from bladellm_kernels.rotary import rotary


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
    rotate: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rotary` of q and k, then `kv_write` of k and v. Returns the rotated q, [T, Hq, D]: `out`, or a new tensor.

    q: [T, Hq, D]; k, v: [T, Hk, D]; all of one float type, any strides but the last, which is 1, such as views of one
    qkv; D even. cos, sin: float32 [T, 1, D] of `rotary_tables`. kv, rows, granule_rows: as in `kv_write`. rotate:
    `hadamard_matrix(D)` of q's type, to turn q and k by `hadamard` after rotary: scores stay, and fewer codes hold k.
    out: [T, Hq, D] of q's type, may be q itself. On CUDA one kernel where triton is installed.
    """
    granule_rows = check_kv_write(kv, rows, k, v, granule_rows)
    _check(q, k, cos, sin, rotate, out)
    if q.is_cuda and find_spec("triton") is not None:
        from bladellm_kernels.kv_write_triton import launch_rotary_kv_write

        out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
        launch_rotary_kv_write(q, k, v, cos, sin, kv, rows, granule_rows, rotate, out)
        return out
    turned_q, turned_k = _turned(q, cos, sin, rotate), _turned(k, cos, sin, rotate)
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
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """`rotary_kv_write` by its parts, each rounded to the type of its inputs."""
    kv_write_reference(kv, rows, _turned(k, cos, sin, rotate), v, granule_rows)
    return _turned(q, cos, sin, rotate)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate: torch.Tensor | None) -> torch.Tensor:
    turned = rotary(x, cos, sin)
    return turned if rotate is None else hadamard(turned, rotate)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    rotate: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    out = q if out is None else out
    tokens, _, dim = q.shape
    if (tokens, dim) != (len(k), k.shape[2]) or dim % 2 or {q.dtype, out.dtype} != {k.dtype} or out.shape != q.shape:
        raise ValueError(
            f"q {list(q.shape)} {q.dtype}, k {list(k.shape)} {k.dtype} and out {list(out.shape)} {out.dtype} must have "
            "the same tokens, type and even head size"
        )
    if cos.shape != (tokens, 1, dim) or sin.shape != cos.shape or {cos.dtype, sin.dtype} != {torch.float32}:
        raise ValueError(f"cos and sin must be float32 [{tokens}, 1, {dim}], got {list(cos.shape)}, {list(sin.shape)}")
    if cos.stride() != sin.stride():
        raise ValueError(f"cos and sin must have the same strides, got {cos.stride()} and {sin.stride()}")
    if rotate is not None and (rotate.shape != (dim, dim) or rotate.dtype != q.dtype):
        raise ValueError(f"rotate must be {q.dtype} [{dim}, {dim}], got {rotate.dtype} {list(rotate.shape)}")
    for name, x in (("q", q), ("out", out), ("cos", cos), ("rotate", q if rotate is None else rotate)):
        if x.stride(-1) != 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, its stride is {x.stride(-1)}")
