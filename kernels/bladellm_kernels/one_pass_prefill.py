"""Prefill attention of all chunks of a step in one pass on a Hopper: over their prefixes and, causally, themselves."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from bladellm_kernels.early_launch import early_launch
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.one_pass_list import ENTRY_FIELDS, heads_of_a_tile, list_programs
from bladellm_kernels.one_pass_parts_hopper import OnePassTile, Stored, Written
from bladellm_kernels.one_pass_prefill_hopper import one_pass_kernel
from bladellm_kernels.one_pass_steps_hopper import ROWS
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_tiles import Span

STAGES = {128: 2, 64: 4}
"""Of keys and of values by the dimensions of a head, 128 KiB in all; queries of two tiles and results of one take 96
KiB more, or 48."""


def launch(q: torch.Tensor, kv: KvLayer, spans: Sequence[Span], scale: float, out: torch.Tensor) -> None:
    """`ragged_prefill_attention` of chunks without window, written to their rows of out; `one_pass_takes`."""
    heads = Heads(q.shape[1], kv.kv_heads, kv.head_dim)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    launch_listed(q, kv, _on_device(tuple(spans), heads, q.device, stream), scale, out)


def launch_listed(q: torch.Tensor, kv: KvLayer, entries: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """The same for entries of `list_programs`, int64 [programs, ENTRY_FIELDS] on the device; those without queries do
    nothing. Nothing behind a chunk is written, and no key behind it read. The device reads the list, so a captured
    launch serves other lists in the same place."""
    heads, group = q.shape[1], q.shape[1] // kv.kv_heads
    tile = OnePassTile(kv.head_dim, heads_of_a_tile(group), STAGES[kv.head_dim])
    triton.set_allocator(_allocate)
    one_pass_kernel[(len(entries),)](
        described(q, group), described(out, group), Written(out, out.stride(0), out.stride(1)), stored(kv),
        entries, heads, group, scale * math.log2(math.e),
        TILE=tile, num_warps=4, **early_launch(q.device),
    )  # fmt: skip


def compile_ahead(q: torch.Tensor, kv: KvLayer) -> None:
    """Compile and load what launches on such tensors need, by a program without queries. q: [1 or more, Hq, D]."""
    entries = torch.zeros(1, ENTRY_FIELDS, dtype=torch.int64, device=q.device)
    launch_listed(q, kv, entries, 1.0, torch.empty_like(q))


def described(data: torch.Tensor, group: int) -> TensorDescriptor:
    """Queries or outputs [n, Hq, D] as the copy engine has them, in tiles of a group's rows."""
    pack = heads_of_a_tile(group)
    block = [ROWS.value // pack, pack, data.shape[2]]
    return TensorDescriptor(data, list(data.shape), list(data.stride()), block, _layout(tuple(block), data.dtype))


@lru_cache(maxsize=16)
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), gl.float16 if dtype == torch.float16 else gl.bfloat16)


def stored(kv: KvLayer) -> Stored:
    """A layer's rows: those of a KV head are columns of one matrix."""
    row_stride, kv_stride, head_stride, _ = kv.payload.stride()
    return Stored(
        kv.payload, row_stride, kv_stride, head_stride, kv_stride + (kv.kv_heads - 1) * head_stride + kv.head_dim
    )


@lru_cache(maxsize=16)
def _on_device(spans: tuple[Span, ...], heads: Heads, device: torch.device, stream: int) -> torch.Tensor:
    """`list_programs` on a device. Kept, since all layers of a step ask for the same; `stream` is where it is used."""
    entries = torch.from_numpy(list_programs(spans, heads, multiprocessors(device)))
    return entries.pin_memory().to(device, non_blocking=True)


def _allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    """Memory for what programs describe to the copy engine; taken again behind the kernel on its stream only."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
