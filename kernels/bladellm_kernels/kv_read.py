"""Read a stretch of one sequence's stored keys and values back as plain numbers."""

import torch

from bladellm_kernels.kv_format import KvFormat
from bladellm_kernels.kv_layer import KvLayer


def kv_read(
    kv: KvLayer, base_row: int, slot: int, first: int, end: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Keys and values of positions [first, end) of the sequence in `slot`, whose position 0 is row `base_row`.

    Returns [end - first, 2, Hk, D] of `dtype` (default: the stored type of an unquantized layer, else float32): a view
    of the memory where it can be one, else a copy. Reads nothing else of the memory. Never waits for a device.
    """
    if not kv.paged:
        stored = kv.payload[base_row + first : base_row + end]
    else:
        # As bytes where elements are, since not every device picks float8 by index.
        payload = kv.payload.view(torch.uint8) if kv.payload.dtype.itemsize == 1 else kv.payload
        stored = payload.index_select(0, granule_rows(kv, slot, first, end)).view(kv.payload.dtype)
    if not kv.format.quantized:
        return stored if dtype is None else stored.to(dtype)
    return dequantize_kv(stored, _scales(kv, slot, first, end), kv.format).to(dtype or torch.float32)


def dequantize_kv(stored: torch.Tensor, scales: torch.Tensor, format: KvFormat) -> torch.Tensor:
    """stored [..., W] and scales [..., planes] of a quantized format -> float32 [..., D]."""
    numbers = (_codes(stored, format).float() - format.offset) * scales[..., :1].float()
    return numbers + scales[..., 1:].float() if format.affine else numbers


def _codes(stored: torch.Tensor, format: KvFormat) -> torch.Tensor:
    """stored [..., W] -> [..., D] of a type that has the format's codes."""
    if format.nibbles:
        return _nibbles(stored)
    if not format.float12:
        return stored
    dim = format.head_dim(stored.shape[-1])
    lower, upper = stored[..., :dim].short(), _nibbles(stored[..., dim:]).short()
    return ((upper >> 3) << 15 | (upper & 7) << 11 | lower << 3).view(torch.float16)


def _nibbles(stored: torch.Tensor) -> torch.Tensor:
    return torch.cat((stored & 15, stored >> 4), -1)


def granule_rows(kv: KvLayer, slot: int, first: int, end: int) -> torch.Tensor:
    """The rows of positions [first, end) counted in the pool's granules: granule · granule_tokens + place, int64."""
    if kv.table is None:
        raise ValueError("this KV layer has no table of granules")
    positions = torch.arange(first, end, device=kv.table.device)
    granules = kv.table[slot, positions // kv.granule_tokens].long()
    return granules * kv.granule_tokens + positions % kv.granule_tokens


def _scales(kv: KvLayer, slot: int, first: int, end: int) -> torch.Tensor:
    """float16 [end - first, 2, Hk, planes]."""
    if kv.scales is None:
        raise ValueError(f"the KV format {kv.format.name} needs scales")
    rows = granule_rows(kv, slot, first, end)
    return kv.scales[rows // kv.granule_tokens, :, :, :, rows % kv.granule_tokens].transpose(1, 2)
