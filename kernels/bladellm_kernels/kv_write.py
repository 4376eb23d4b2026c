"""Write new keys and values into a layer's KV memory, in its format."""

import torch

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_quantize import kv_quantize


def kv_write(
    kv: KvLayer, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, granule_rows: torch.Tensor | None = None
) -> None:
    """Store token t's key and value in payload row `rows[t]`, in place, with their scales where the format has them.

    rows: int64 [T], contiguous, distinct, or negative for tokens that are not stored (padding of a captured step).
    k, v: [T, Hk, D] of one float type (the payload's, if unquantized), any strides but the last, which is 1.
    granule_rows: int64 [T], contiguous, the same tokens in the pool's granules, granule · granule_tokens + place;
    needed for scales, and left out in paged memory, where they are `rows`. Touches no other row or scale. On CUDA one
    kernel where triton is installed.
    """
    granule_rows = check_kv_write(kv, rows, k, v, granule_rows)
    if kv.payload.is_cuda and has_triton():
        from bladellm_kernels.kv_write_triton import launch_kv_write

        launch_kv_write(kv, rows, granule_rows, k, v)
    else:
        kv_write_by_operators(kv, rows, k, v, granule_rows)


def kv_write_reference(
    kv: KvLayer, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, granule_rows: torch.Tensor | None = None
) -> None:
    """`kv_write`, one vector at a time."""
    places = rows if granule_rows is None else granule_rows
    for token, (row, place) in enumerate(zip(rows.tolist(), places.tolist(), strict=True)):
        if row < 0:
            continue
        for which, x in enumerate((k, v)):
            for head in range(kv.kv_heads):
                if not kv.format.quantized:
                    kv.payload[row, which, head] = x[token, head]
                    continue
                codes, scales = kv_quantize(x[token, head], kv.format)
                kv.payload[row, which, head].view(torch.uint8).copy_(codes.view(torch.uint8))
                if kv.scales is not None:
                    kv.scales[place // kv.granule_tokens, head, which, :, place % kv.granule_tokens] = scales


def kv_write_by_operators(
    kv: KvLayer, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, granule_rows: torch.Tensor | None
) -> None:
    """`kv_write` in plain PyTorch; the arguments have been checked."""
    stored = rows >= 0
    if not bool(stored.all()):
        rows, k, v = rows[stored], k[stored], v[stored]
        granule_rows = None if granule_rows is None else granule_rows[stored]
    # Not every device copies float8 by index.
    payload = kv.payload.view(torch.uint8) if kv.payload.dtype.itemsize == 1 else kv.payload
    if kv.scales is None or granule_rows is None:
        payload[:, 0].index_copy_(0, rows, k)
        payload[:, 1].index_copy_(0, rows, v)
        return
    codes, scales = kv_quantize(torch.stack((k, v), 1), kv.format)
    payload.index_copy_(0, rows, codes.view(torch.uint8))
    granules, places = granule_rows // kv.granule_tokens, granule_rows % kv.granule_tokens
    kv.scales[granules, :, :, :, places] = scales.transpose(1, 2)


def check_kv_write(
    kv: KvLayer, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, granule_rows: torch.Tensor | None
) -> torch.Tensor | None:
    """The granule rows to use. Raises `ValueError` for arguments that do not fit together."""
    payload, format = kv.payload, kv.format
    shape = (rows.shape[0], payload.shape[2], kv.head_dim)
    if k.shape != shape or v.shape != shape or k.dtype != v.dtype:
        raise ValueError(
            f"k and v must be {list(shape)} of one type, got {list(k.shape)} {k.dtype} and {list(v.shape)} {v.dtype}"
        )
    if format.storage is None and k.dtype != payload.dtype:
        raise ValueError(f"k and v must be {payload.dtype} as the memory is, got {k.dtype}")
    if granule_rows is None and kv.paged:
        granule_rows = rows
    if format.planes and (kv.scales is None or granule_rows is None):
        raise ValueError(f"the KV format {format.name} needs scales and granule_rows")
    _check_index("rows", rows, shape[0])
    if granule_rows is not None and granule_rows is not rows:
        _check_index("granule_rows", granule_rows, shape[0])
    if k.stride(2) != 1 or v.stride(2) != 1 or payload.stride(3) != 1:
        _check_last_strides(k, v, payload)
    return granule_rows


def _check_index(name: str, index: torch.Tensor, tokens: int) -> None:
    if index.dtype != torch.int64 or index.shape != (tokens,):
        raise ValueError(f"{name} must be int64 [{tokens}], got {index.dtype} {list(index.shape)}")


def _check_last_strides(k: torch.Tensor, v: torch.Tensor, payload: torch.Tensor) -> None:
    for name, x in (("k", k), ("v", v), ("the payload", payload)):
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(f"the last dimension of {name} must be contiguous, its stride is {x.stride(-1)}")
