"""Whether `one_pass_prefill` can do prefill attention on some tensors."""

import torch

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.hopper_device import on_hopper
from bladellm_kernels.kv_layer import KvLayer

HEAD_DIMS = (64, 128)


def one_pass_serves(kv: KvLayer, dtype: torch.dtype) -> bool:
    """For queries of `dtype` and sequences of which every query sees all before it: on a Hopper half precision, and
    plain contiguous memory at whole 16 bytes."""
    return one_pass_serves_numbers(kv, dtype) and not kv.format.quantized and not kv.paged and _fits(kv.payload)


def one_pass_serves_numbers(kv: KvLayer, dtype: torch.dtype) -> bool:
    """The same on numbers made of the layer's codes."""
    if not has_triton() or not on_hopper(kv.payload):
        return False
    return dtype in (torch.float16, torch.bfloat16) and kv.head_dim in HEAD_DIMS


def attends_fresh(kv: KvLayer, dtype: torch.dtype) -> bool:
    """Whether keys and values of `dtype` are stored as they were computed, though in other bits: chunks with nothing
    before them may be attended to on what was computed."""
    return kv.format.float12 and dtype == torch.bfloat16


def one_pass_takes(q: torch.Tensor, kv: KvLayer, window: int | None, longest: int, out: torch.Tensor) -> bool:
    """The same for sequences of up to `longest`, and whether queries and results are at whole 16 bytes, too."""
    return one_pass_serves(kv, q.dtype) and _sees_all(window, longest) and _fits(q) and _fits(out)


def one_pass_takes_numbers(q: torch.Tensor, kv: KvLayer, window: int | None, longest: int, out: torch.Tensor) -> bool:
    """The same on numbers made of the layer's codes."""
    serves = kv.format.quantized and one_pass_serves_numbers(kv, q.dtype)
    return serves and _sees_all(window, longest) and _fits(q) and _fits(out)


def _sees_all(window: int | None, longest: int) -> bool:
    return window is None or window >= longest


def _fits(data: torch.Tensor) -> bool:
    """Whether the copy engine can have it."""
    *outer, last = data.stride()
    return data.data_ptr() % 16 == 0 and last == 1 and all(stride > 0 and stride % 8 == 0 for stride in outer)
