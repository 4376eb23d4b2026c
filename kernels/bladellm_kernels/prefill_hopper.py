"""Prefill attention for Hopper: the softmax of a tile of keys runs beside the products of its neighbours.

The work list and the rows of a tile are those of `ragged_prefill_triton`; the order of operations follows
FlashAttention-3 (arXiv:2407.08608, algorithm 2), in Gluon, Triton's language with explicit layouts and waits: step t
starts Q·K of tile t and P·V of tile t - 1 together, and takes the softmax of tile t while the second one runs. Keys go
from the last to the first, so that only the first steps mask.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_tiles import ITEM_FIELDS

ROWS, KEYS, WARPS, STAGES = 128, 128, 8, 3


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(
    buffer: gl.shared_memory_descriptor,
    base: gl.tensor,
    key0: gl.tensor,
    key_end: gl.tensor,
    row_stride: gl.tensor,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    COPY: gl.constexpr,
    MASKED: gl.constexpr,
) -> None:
    """Start to copy keys [key0, key0 + KEYS) of `base` to a buffer, those from key_end on as zeros."""
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, COPY))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    places = base + key0.to(gl.int64) * row_stride + ((key * row_stride)[:, None] + dim[None, :])
    if MASKED:
        async_copy.async_copy_global_to_shared(buffer, places, (key0 + key < key_end)[:, None])
    else:
        async_copy.async_copy_global_to_shared(buffer, places)


@gluon.jit  # type: ignore[untyped-decorator]
def _soften(
    scores: gl.tensor,
    peak: gl.tensor,
    total: gl.tensor,
    key0: gl.tensor,
    position: gl.tensor,
    key_end: gl.tensor,
    qk_scale: gl.tensor,
    SCORES: gl.constexpr,
    KEYS: gl.constexpr,
    MASKED: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """One step of the running softmax: weights, new peak, new total, and what older sums fade by."""
    if MASKED:
        key = key0 + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        visible = (key[None, :] <= position[:, None]) & (key < key_end)[None, :]
        scores = gl.where(visible, scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1) * qk_scale)
    level = higher
    if MASKED:
        # A row that sees nothing yet has no finite peak, and -inf - -inf is not a number.
        level = gl.where(higher == float("-inf"), 0.0, higher)
    weights = gl.exp2(scores * qk_scale - level[:, None])
    fade = gl.exp2(peak - level)
    return weights, higher, total * fade + gl.sum(weights, 1), fade


@gluon.jit  # type: ignore[untyped-decorator]
def _hold(total: gl.tensor) -> gl.tensor:
    """The same; a branch, never taken, that what follows cannot be moved across: ptxas would put the wait for P·V
    before the softmax that is to run beside it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.lt.f32 p, $1, 0f00000000; vote.sync.any.pred p, p, -1; @p trap; mov.b32 $0, $1; }",
        "=r,r", [total], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit  # type: ignore[untyped-decorator]
def _steps(
    first: gl.tensor,
    last: gl.tensor,
    tiles: gl.tensor,
    state: gl.tuple,
    q_buffer: gl.shared_memory_descriptor,
    k_buffers: gl.shared_memory_descriptor,
    v_buffers: gl.shared_memory_descriptor,
    k_base: gl.tensor,
    v_base: gl.tensor,
    row_stride: gl.tensor,
    key_first: gl.tensor,
    key_end: gl.tensor,
    position: gl.tensor,
    qk_scale: gl.tensor,
    SCORES: gl.constexpr,
    OUTPUT: gl.constexpr,
    COPY: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """Steps [first, last) of `tiles`. state: weights of the step before, the outputs of those before that, what these
    fade by, total, peak.

    Copies are behind one another: values of this step, then keys of STAGES - 1 steps ahead, so that at the next step
    all but the newest are waited for.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    ROWS: gl.constexpr = q_buffer.shape[0]
    weights, acc, fade, total, peak = state
    for step in range(first, last):
        key0 = key_first + (tiles - 1 - step) * KEYS
        # Keys of this step and values of the one before are here; nobody reads the buffers that are filled next.
        async_copy.wait_group(1)
        gl.thread_barrier()
        scores = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
        k_buffer = k_buffers.index(step % STAGES).permute((1, 0))
        scores = warpgroup_mma(q_buffer, k_buffer, scores, use_acc=False, is_async=True)
        _fetch(v_buffers.index(step % 2), v_base, key0, key_end, row_stride, KEYS, DIM, COPY, False)
        async_copy.commit_group()
        ahead = step + STAGES - 1
        if ahead < tiles:
            ahead_key = key_first + (tiles - 1 - ahead) * KEYS
            _fetch(k_buffers.index(ahead % STAGES), k_base, ahead_key, key_end, row_stride, KEYS, DIM, COPY, False)
        async_copy.commit_group()
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
        acc = warpgroup_mma(weights, v_buffers.index((step - 1) % 2), acc, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        numbers, peak, total, fade = _soften(
            scores, peak, total, key0, position, key_end, qk_scale, SCORES, KEYS, MASKED
        )
        total = _hold(total)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        weights = gl.convert_layout(numbers.to(weights.dtype), OPERAND)
    return weights, acc, fade, total, peak


@gluon.jit  # type: ignore[untyped-decorator]
def hopper_prefill_kernel(
    q: gl.tensor,
    q_token_stride: gl.tensor,
    q_head_stride: gl.tensor,
    out: gl.tensor,
    out_token_stride: gl.tensor,
    out_head_stride: gl.tensor,
    payload: gl.tensor,
    row_stride: gl.tensor,
    kv_stride: gl.tensor,
    head_stride: gl.tensor,
    items: gl.tensor,
    partial: gl.tensor,
    partial_lse: gl.tensor,
    qk_scale: gl.tensor,
    FIELDS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    ROWS: gl.constexpr,
    KEYS: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """A program an item of `prefill_tiles.list_tiles` and KV head, as in `ragged_prefill_triton`; qk_scale: log2 e in
    it. partial: float32 [P · KV_HEADS, ROWS, DIM], and partial_lse, base 2, of items that see a part of their keys."""
    dtype: gl.constexpr = q.dtype.element_ty
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [WARPS, 1], [1, 0])
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, KEYS, 16])
    OUTPUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUTPUT, k_width=2)
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, DIM], dtype)
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    head = gl.program_id(0) % KV_HEADS
    item = items + (gl.program_id(0) // KV_HEADS) * FIELDS
    first_row = gl.load(item).to(gl.int32)
    first_token = gl.load(item + 1)
    query_len = gl.load(item + 2).to(gl.int32)
    start = gl.load(item + 3).to(gl.int32)
    key_first, key_end = gl.load(item + 6).to(gl.int32), gl.load(item + 7).to(gl.int32)
    part = gl.load(item + 8)
    k_base = payload + head.to(gl.int64) * head_stride + gl.load(item + 4) * row_stride
    v_base = k_base + kv_stride
    tiles = (key_end - key_first + KEYS - 1) // KEYS

    q_buffer = gl.allocate_shared_memory(dtype, [ROWS, DIM], SHARED)
    k_buffers = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], SHARED)
    v_buffers = gl.allocate_shared_memory(dtype, [2, KEYS, DIM], SHARED)
    last = key_first + (tiles - 1) * KEYS
    _fetch(k_buffers.index(0), k_base, last, key_end, row_stride, KEYS, DIM, COPY, True)
    async_copy.commit_group()
    _fetch(v_buffers.index(0), v_base, last, key_end, row_stride, KEYS, DIM, COPY, True)
    for step in gl.static_range(1, STAGES):
        if step < tiles:
            _fetch(k_buffers.index(step), k_base, last - step * KEYS, key_end, row_stride, KEYS, DIM, COPY, False)
        async_copy.commit_group()

    row = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    dim = gl.arange(0, DIM, layout=gl.SliceLayout(0, COPY))
    places = (first_token + row // GROUP) * q_token_stride + (head * GROUP + row % GROUP) * q_head_stride
    q_buffer.store(gl.load(q + places[:, None] + dim[None, :], (row // GROUP < query_len)[:, None], 0.0))
    position = start + (first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))) // GROUP

    async_copy.wait_group(STAGES - 1)
    fence_async_shared()
    gl.thread_barrier()
    scores = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    scores = warpgroup_mma(q_buffer, k_buffers.index(0).permute((1, 0)), scores, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,))
    peak = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    numbers, peak, total, fade = _soften(scores, peak, total, last, position, key_end, qk_scale, SCORES, KEYS, True)
    acc = gl.zeros((ROWS, DIM), gl.float32, OUTPUT)
    state = gl.convert_layout(numbers.to(dtype), OPERAND), acc, fade, total, peak
    # Below the lowest position of the tile's queries every row sees every key.
    lowest = start + first_row // GROUP
    masked = tiles - gl.maximum(gl.minimum(lowest + 1, key_end) - key_first, 0) // KEYS
    state = _steps(
        1, masked, tiles, state, q_buffer, k_buffers, v_buffers, k_base, v_base, row_stride, key_first, key_end,
        position, qk_scale, SCORES, OUTPUT, COPY, KEYS, DIM, STAGES, True,
    )  # fmt: skip
    weights, acc, fade, total, peak = _steps(
        gl.maximum(masked, 1), tiles, tiles, state, q_buffer, k_buffers, v_buffers, k_base, v_base, row_stride,
        key_first, key_end, position, qk_scale, SCORES, OUTPUT, COPY, KEYS, DIM, STAGES, False,
    )  # fmt: skip
    async_copy.wait_group(0)
    gl.thread_barrier()
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, OUTPUT))[:, None]
    acc = warpgroup_mma(weights, v_buffers.index((tiles - 1) % 2), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    attended = acc / gl.convert_layout(total, gl.SliceLayout(1, OUTPUT))[:, None]
    if part < 0:
        places = (first_token + row // GROUP) * out_token_stride + (head * GROUP + row % GROUP) * out_head_stride
        result = gl.convert_layout(attended.to(dtype), COPY)
        gl.store(out + places[:, None] + dim[None, :], result, (row // GROUP < query_len)[:, None])
    else:
        line = (part * KV_HEADS + head) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUTPUT))
        column = gl.arange(0, DIM, layout=gl.SliceLayout(0, OUTPUT))
        gl.store(partial + line[:, None] * DIM + column[None, :], attended)
        lse = gl.convert_layout(peak + gl.log2(total), gl.SliceLayout(1, OUTPUT))
        gl.store(partial_lse + line, lse)


def takes(q: torch.Tensor, kv: KvLayer, window: int | None) -> bool:
    """Whether `launch` can do it: half precision, plain contiguous memory, whole sequences in sight, a Hopper."""
    fits = kv.head_dim in (64, 128) and q.dtype in (torch.float16, torch.bfloat16)
    plain = not kv.format.quantized and not kv.paged and kv.payload.stride(0) * KEYS < 2**31
    return fits and plain and window is None and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9


def launch(
    q: torch.Tensor,
    kv: KvLayer,
    items: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    partial: torch.Tensor,
    partial_lse: torch.Tensor,
) -> None:
    """The items, of ROWS rows each; those that see a part of their keys go to partial, float32 [lines, D],
    and partial_lse [lines], base 2."""
    row_stride, kv_stride, head_stride, _ = kv.payload.stride()
    hopper_prefill_kernel[(len(items) * kv.kv_heads,)](
        q, q.stride(0), q.stride(1), out, out.stride(0), out.stride(1), kv.payload, row_stride, kv_stride, head_stride,
        items, partial, partial_lse, scale * math.log2(math.e),
        FIELDS=ITEM_FIELDS, KV_HEADS=kv.kv_heads, GROUP=q.shape[1] // kv.kv_heads, DIM=kv.head_dim,
        ROWS=ROWS, KEYS=KEYS, STAGES=STAGES, WARPS=WARPS, num_warps=WARPS, **early_launch(q.device),
    )  # fmt: skip
