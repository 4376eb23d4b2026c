"""The CUDA kernel of `kv_dequantize`: a program copies a few tokens' keys, or values, of one KV head."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_tiles import TileShape
from bladellm_kernels.ragged_prefill_triton import kernel_memory, kernel_shape, load_tile

TOKENS = 32
WARPS = 4


@triton.jit(do_not_specialize=["base_row", "slot", "first", "end"])  # type: ignore[untyped-decorator]
def kv_dequantize_kernel(
    memory: tl.tensor,
    out: tl.tensor,
    out_token_stride: tl.tensor,
    out_kv_stride: tl.tensor,
    out_head_stride: tl.tensor,
    base_row: tl.tensor,
    slot: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    SHAPE: tl.constexpr,
) -> None:
    """Grid: blocks of SHAPE.keys tokens × KV heads × (K, V). memory: `ragged_prefill_triton.Memory`."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    token = tl.program_id(0) * SHAPE.keys + tl.arange(0, SHAPE.keys)
    key = first + token
    inside = key < end
    row = (base_row + key).to(tl.int64)
    scale_offsets = row
    if SHAPE.paged or SHAPE.planes > 0:
        granules = memory.table + tl.cast(slot, tl.int64) * memory.slot_stride
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
    places = token.to(tl.int64) * out_token_stride + part * out_kv_stride + head * out_head_stride
    tl.store(out + places[:, None] + dim[None, :], numbers, mask=inside[:, None] & (dim < SHAPE.head_dim)[None, :])


def launch(kv: KvLayer, slot: int, base_row: int, first: int, end: int, out: torch.Tensor) -> None:
    """`kv_dequantize` by one kernel; the arguments have been checked."""
    shape = kernel_shape(kv, 1, TileShape(TOKENS, TOKENS, WARPS, 1), False, out.dtype)
    kv_dequantize_kernel[(triton.cdiv(end - first, TOKENS), kv.kv_heads, 2)](
        kernel_memory(kv), out, *out.stride()[:3], base_row, slot, first, end, SHAPE=shape, num_warps=WARPS
    )
