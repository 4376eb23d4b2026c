"""Copy a stretch of a sequence's stored keys and values, as plain numbers, into a buffer."""

from importlib.util import find_spec

import torch

from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read


def kv_dequantize(kv: KvLayer, base_row: int, slot: int, first: int, end: int, out: torch.Tensor) -> None:
    """Write positions [first, end) of the sequence in `slot`, whose position 0 is row `base_row`, to `out`.

    out: [end - first, 2, Hk, D], K at index 0 and V at 1, elements of a head contiguous; a floating type. Gathers paged
    memory, dequantizes quantized formats, reads nothing else, never waits for a device.
    """
    shape = (end - first, 2, kv.kv_heads, kv.head_dim)
    if out.shape != shape or out.stride(3) != 1:
        raise ValueError(f"out must be {shape} with contiguous heads, got {tuple(out.shape)}")
    if out.is_cuda and (kv.paged or kv.format.quantized) and find_spec("triton") is not None:
        from bladellm_kernels.kv_dequantize_triton import launch

        launch(kv, slot, base_row, first, end, out)
    else:
        kv_dequantize_reference(kv, base_row, slot, first, end, out)


def kv_dequantize_reference(kv: KvLayer, base_row: int, slot: int, first: int, end: int, out: torch.Tensor) -> None:
    """`kv_dequantize` by `kv_read`."""
    out.copy_(kv_read(kv, base_row, slot, first, end))
