"""The CUDA kernel of `kv_dequantize`: a program copies a few tokens' keys, or values, of one KV head."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from bladellm_kernels.kv_dequantize import Stretch
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_tiles import TileShape
from bladellm_kernels.ragged_prefill_triton import kernel_memory, kernel_shape, load_tile

TOKENS = 32
WARPS = 4
FIELDS = 5


@triton.jit  # type: ignore[untyped-decorator]
def kv_dequantize_kernel(
    memory: tl.tensor,
    out: tl.tensor,
    out_token_stride: tl.tensor,
    out_kv_stride: tl.tensor,
    out_head_stride: tl.tensor,
    blocks: tl.tensor,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
) -> None:
    """Grid: blocks × KV heads × (K, V). memory: `ragged_prefill_triton.Memory`; blocks: see `list_blocks`."""
    head = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    block = blocks + tl.program_id(0) * FIELDS
    token = tl.arange(0, SHAPE.keys)
    key = tl.load(block + 2) + token
    inside = key < tl.load(block + 3)
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
    places = (tl.load(block + 4) + token) * out_token_stride + part * out_kv_stride + head * out_head_stride
    tl.store(out + places[:, None] + dim[None, :], numbers, mask=inside[:, None] & (dim < SHAPE.head_dim)[None, :])


def launch(kv: KvLayer, stretches: tuple[Stretch, ...], out: torch.Tensor) -> None:
    """`kv_dequantize` by one kernel; the arguments have been checked."""
    if not len(out):
        return
    stream = torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0
    blocks = blocks_on_device(stretches, out.device, stream)
    shape = kernel_shape(kv, 1, TileShape(TOKENS, TOKENS, WARPS, 1), False, out.dtype)
    kv_dequantize_kernel[(len(blocks), kv.kv_heads, 2)](
        kernel_memory(kv), out, *out.stride()[:3], blocks, FIELDS=FIELDS, SHAPE=shape, num_warps=WARPS
    )


def list_blocks(stretches: tuple[Stretch, ...]) -> list[list[int]]:
    """Blocks of up to TOKENS positions: base row, slot, first position, end of the positions, row of `out`."""
    blocks: list[list[int]] = []
    done = 0
    for base_row, slot, first, end in stretches:
        for begin in range(first, end, TOKENS):
            blocks.append([base_row, slot, begin, min(begin + TOKENS, end), done + begin - first])
        done += end - first
    return blocks


@lru_cache(maxsize=64)
def blocks_on_device(stretches: tuple[Stretch, ...], device: torch.device, stream: int) -> torch.Tensor:
    """`list_blocks`, int64 [blocks, FIELDS]. Kept, since all layers of a step ask for the same; `stream` is where it is
    used."""
    blocks = torch.tensor(list_blocks(stretches), dtype=torch.int64, pin_memory=device.type == "cuda")
    return blocks.to(device, non_blocking=True)
