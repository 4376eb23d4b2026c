"""The CUDA kernel of `kv_dequantize`: a program copies keys, or values, of one KV head, a few tokens at a time."""

from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
import triton
import triton.language as tl

from bladellm_kernels.kv_dequantize import BLOCK_FIELDS, BLOCK_TOKENS, Stretch, list_blocks
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_tiles import TileShape
from bladellm_kernels.ragged_prefill_triton import kernel_memory, kernel_shape, load_tile

WARPS = 4


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def kv_dequantize_kernel(
    memory: tl.tensor,
    out: tl.tensor,
    out_token_stride: tl.tensor,
    out_kv_stride: tl.tensor,
    out_head_stride: tl.tensor,
    blocks: tl.tensor,
    count: tl.tensor,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    """Grid: programs × KV heads × (K, V). memory: `ragged_prefill_triton.Memory`; blocks: of `list_blocks`, `count` of
    them, of which the first one without positions is the end."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    number = tl.program_id(0)
    first, end = _positions(blocks, number, count, FIELDS)
    while first < end:
        _copy_block(memory, out, (out_token_stride, out_kv_stride, out_head_stride), blocks + number * FIELDS, head,
                    part, first, end, SHAPE)  # fmt: skip
        number += tl.num_programs(0)
        first, end = _positions(blocks, number, count, FIELDS)


@triton.jit  # type: ignore[untyped-decorator]
def _positions(blocks: tl.tensor, number: tl.tensor, count: tl.tensor, FIELDS: tl.constexpr) -> tl.tuple:
    """First position and end of a block; none behind the last one."""
    block = blocks + number * FIELDS
    return tl.load(block + 2, mask=number < count, other=0), tl.load(block + 3, mask=number < count, other=0)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_block(
    memory: tl.tensor,
    out: tl.tensor,
    strides: tl.tuple,
    block: tl.tensor,
    head: tl.tensor,
    part: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """strides: of out, by tokens, K and V, and heads."""
    token = tl.arange(0, SHAPE.keys)
    key = first + token
    inside = key < end
    row = tl.load(block) + key
    scale_offsets = row
    if SHAPE.paged or SHAPE.planes > 0:
        granules = memory.table + tl.load(block + 1) * memory.slot_stride
        granule = tl.load(granules + key // memory.granule_tokens, mask=inside, other=0).to(tl.int64)
        place = key % memory.granule_tokens
        scale_offsets = granule * memory.scale_granule_stride + place
        if SHAPE.paged:
            row = granule * memory.granule_tokens + place
    numbers = load_tile(
        memory.payload + head * memory.head_stride + part * memory.kv_stride, row * memory.row_stride, inside,
        memory.scales + head * memory.scale_head_stride + part * memory.scale_kv_stride, scale_offsets,
        memory.plane_stride, SHAPE, True, out.dtype.element_ty,
    )  # fmt: skip
    dim = tl.arange(0, SHAPE.block_d)
    token_stride, kv_stride, head_stride = strides
    places = (tl.load(block + 4) + token) * token_stride + part * kv_stride + head * head_stride
    tl.store(out + places[:, None] + dim[None, :], numbers, mask=inside[:, None] & (dim < SHAPE.head_dim)[None, :])


def launch(kv: KvLayer, stretches: tuple[Stretch, ...], out: torch.Tensor) -> None:
    """`kv_dequantize` by one kernel; the arguments have been checked."""
    if not len(out):
        return
    stream = torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0
    launch_blocks(kv, blocks_on_device(stretches, out.device, stream), out)


def launch_blocks(kv: KvLayer, blocks: torch.Tensor, out: torch.Tensor, most_programs: int | None = None) -> None:
    """The same of blocks as `list_blocks` has them, int64 [n, BLOCK_FIELDS] on the device, those without positions the
    last ones. most_programs: about so many; None for one for each block of each head's keys, and values."""
    shape = kernel_shape(kv, 1, TileShape(BLOCK_TOKENS, BLOCK_TOKENS, WARPS, 1), False, out.dtype)
    count = len(blocks)
    programs = count if most_programs is None else min(count, max(1, most_programs // (2 * kv.kv_heads)))
    kv_dequantize_kernel[(programs, kv.kv_heads, 2)](
        kernel_memory(kv), out, *out.stride()[:3], blocks, count, FIELDS=BLOCK_FIELDS, SHAPE=shape, num_warps=WARPS
    )


@lru_cache(maxsize=64)
def blocks_on_device(stretches: tuple[Stretch, ...], device: torch.device, stream: int) -> torch.Tensor:
    """The blocks of stretches, one behind the other in `out`. Kept, since all layers of a step ask for the same;
    `stream` is where it is used."""
    ends = accumulate(end - first for _, _, first, end in stretches)
    rows = [0, *ends][:-1]
    blocks = torch.from_numpy(np.concatenate(list(map(list_blocks, stretches, rows))))
    return (blocks.pin_memory() if device.type == "cuda" else blocks).to(device, non_blocking=True)
