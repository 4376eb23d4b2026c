"""The CUDA kernel that puts the parts of a prefill tile together, where its keys were divided over programs."""

import triton
import triton.language as tl

from bladellm_kernels.early_launch import let_next_start, wait_for_inputs


@triton.jit  # type: ignore[untyped-decorator]
def merge_tiles_kernel(
    out: tl.tensor,
    merges: tl.tensor,
    partial: tl.tensor,
    partial_lse: tl.tensor,
    FIELDS: tl.constexpr,
    SHAPE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """A program a merge and KV head. out: `ragged_prefill_triton.Rows`; merges: int64 [M, FIELDS], see
    `prefill_tiles.list_tiles`; partial and partial_lse as `ragged_prefill_kernel` writes them."""
    ROWS: tl.constexpr = SHAPE.rows
    BLOCK_D: tl.constexpr = SHAPE.block_d
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    head = tl.program_id(0) % SHAPE.kv_heads
    item = merges + (tl.program_id(0) // SHAPE.kv_heads) * FIELDS
    row = tl.load(item).to(tl.int32) + tl.arange(0, SHAPE.rows)
    dim = tl.arange(0, SHAPE.block_d)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    for part in range(tl.load(item + 3), tl.load(item + 3) + tl.load(item + 4)):
        line = (part * SHAPE.kv_heads + head) * SHAPE.rows + tl.arange(0, SHAPE.rows)
        lse = tl.load(partial_lse + line)
        higher = tl.maximum(peak, lse)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(peak - level), tl.exp2(lse - level)
        attended = tl.load(partial + line[:, None] * SHAPE.block_d + dim[None, :])
        acc = acc * fade[:, None] + attended * weight[:, None]
        total = total * fade + weight
        peak = higher
    token = row // SHAPE.group
    places = (tl.load(item + 1) + token) * out.token_stride
    places += (head * SHAPE.group + row % SHAPE.group) * out.head_stride
    real = (token < tl.load(item + 2))[:, None] & (dim < SHAPE.head_dim)[None, :]
    merged = (acc / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.data.dtype.element_ty)
    tl.store(out.data + places[:, None] + dim[None, :], merged, mask=real)
