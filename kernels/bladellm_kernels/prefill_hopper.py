"""Prefill attention for Hopper: the softmax of a tile of keys runs beside the products of its neighbours.

The work list and the rows of a tile are those of `ragged_prefill_triton`; the order of operations follows
FlashAttention-3 (arXiv:2407.08608, algorithm 2), in Gluon, Triton's language with explicit layouts and waits: step t
starts Q·K of tile t and P·V of tile t - 1 together, and takes the softmax of tile t while the second one runs. Keys go
from the last to the first, so that only the first steps mask.
"""

import math
from typing import NamedTuple

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


class Shape(NamedTuple):
    """What the kernel is compiled for. stages: buffers of keys; values have two."""

    kv_heads: int
    group: int
    dim: int
    rows: int = ROWS
    keys: int = KEYS
    stages: int = STAGES
    warps: int = WARPS


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def copy_layout(shape: Shape) -> gl.BlockedLayout:
    """Of rows on their way from or to memory, 16 bytes a thread."""
    return gl.BlockedLayout([1, 8], [256 // shape.dim, shape.dim // 8], [shape.warps, 1], [1, 0])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def scores_layout(shape: Shape) -> gl.NVMMADistributedLayout:
    """Of Q·K, [rows, keys]."""
    return gl.NVMMADistributedLayout([3, 0], [shape.warps, 1], [16, shape.keys, 16])


@gluon.constexpr_function  # type: ignore[untyped-decorator]
def output_layout(shape: Shape) -> gl.NVMMADistributedLayout:
    """Of P·V, [rows, dim]."""
    return gl.NVMMADistributedLayout([3, 0], [shape.warps, 1], [16, shape.dim, 16])


@gluon.jit  # type: ignore[untyped-decorator]
def _fetch(
    buffer: gl.shared_memory_descriptor,
    base: gl.tensor,
    key0: gl.tensor,
    key_end: gl.tensor,
    row_stride: gl.tensor,
    SHAPE: gl.constexpr,
    MASKED: gl.constexpr,
) -> None:
    """Start to copy keys from key0 on to a buffer; with MASKED, those from key_end on as zeros."""
    COPY: gl.constexpr = copy_layout(SHAPE)
    key = gl.arange(0, SHAPE.keys, layout=gl.SliceLayout(1, COPY))
    dim = gl.arange(0, SHAPE.dim, layout=gl.SliceLayout(0, COPY))
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
    key_end: gl.tensor,
    position: gl.tensor,
    qk_scale: gl.tensor,
    SHAPE: gl.constexpr,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """One step of the running softmax: weights, new peak, new total, and what older sums fade by."""
    if MASKED:
        key = key0 + gl.arange(0, SHAPE.keys, layout=gl.SliceLayout(0, scores_layout(SHAPE)))
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
def _as_weights(numbers: gl.tensor, dtype: gl.constexpr, SHAPE: gl.constexpr) -> gl.tensor:
    """As the left side of P·V, in registers."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=output_layout(SHAPE), k_width=2)
    return gl.convert_layout(numbers.to(dtype), OPERAND)


@gluon.jit  # type: ignore[untyped-decorator]
def _start_sum(
    acc: gl.tensor, fade: gl.tensor, weights: gl.tensor, buffer: gl.shared_memory_descriptor, SHAPE: gl.constexpr
) -> gl.tensor:
    """Start acc · fade + weights · values."""
    fade = gl.convert_layout(fade, gl.SliceLayout(1, output_layout(SHAPE)))
    return warpgroup_mma(weights, buffer, acc * fade[:, None], is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _start_scores(
    q_buffer: gl.shared_memory_descriptor, buffer: gl.shared_memory_descriptor, SHAPE: gl.constexpr
) -> gl.tensor:
    """Start Q·K."""
    ROWS: gl.constexpr = SHAPE.rows
    KEYS: gl.constexpr = SHAPE.keys
    nothing = gl.zeros((ROWS, KEYS), gl.float32, scores_layout(SHAPE))
    return warpgroup_mma(q_buffer, buffer.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit  # type: ignore[untyped-decorator]
def _steps(
    first: gl.tensor,
    last: gl.tensor,
    tiles: gl.tensor,
    state: gl.tuple,
    buffers: gl.tuple,
    memory: gl.tuple,
    position: gl.tensor,
    qk_scale: gl.tensor,
    SHAPE: gl.constexpr,
    MASKED: gl.constexpr,
) -> gl.tuple:
    """Steps [first, last) of `tiles`. state: weights of the step before, the outputs of those before that, what these
    fade by, total, peak. memory: keys, values, their row stride, the first key and the end of keys.

    Copies are behind one another: values of this step, then keys of `stages` - 1 steps ahead, so that at the next step
    all but the newest are waited for.
    """
    weights, acc, fade, total, peak = state
    q_buffer, k_buffers, v_buffers = buffers
    keys, values, row_stride, key_first, key_end = memory
    for step in range(first, last):
        key0 = key_first + (tiles - 1 - step) * SHAPE.keys
        # Keys of this step and values of the one before are here; nobody reads the buffers that are filled next.
        async_copy.wait_group(1)
        gl.thread_barrier()
        scores = _start_scores(q_buffer, k_buffers.index(step % SHAPE.stages), SHAPE)
        _fetch(v_buffers.index(step % 2), values, key0, key_end, row_stride, SHAPE, False)
        async_copy.commit_group()
        ahead = step + SHAPE.stages - 1
        if ahead < tiles:
            ahead_key = key_first + (tiles - 1 - ahead) * SHAPE.keys
            _fetch(k_buffers.index(ahead % SHAPE.stages), keys, ahead_key, key_end, row_stride, SHAPE, False)
        async_copy.commit_group()
        acc = _start_sum(acc, fade, weights, v_buffers.index((step - 1) % 2), SHAPE)
        scores = warpgroup_mma_wait(num_outstanding=1, deps=(scores,))
        numbers, peak, total, fade = _soften(scores, peak, total, key0, key_end, position, qk_scale, SHAPE, MASKED)
        total = _hold(total)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        weights = _as_weights(numbers, weights.dtype, SHAPE)
    return weights, acc, fade, total, peak


@gluon.jit  # type: ignore[untyped-decorator]
def _first_step(
    tiles: gl.tensor,
    queries: gl.tensor,
    buffers: gl.tuple,
    memory: gl.tuple,
    inside: gl.tensor,
    position: gl.tensor,
    qk_scale: gl.tensor,
    SHAPE: gl.constexpr,
) -> gl.tuple:
    """The state behind step 0, the only one whose keys may end within its tile; queries: places in memory."""
    q_buffer, k_buffers, v_buffers = buffers
    keys, values, row_stride, key_first, key_end = memory
    SCORES: gl.constexpr = scores_layout(SHAPE)
    STAGES: gl.constexpr = SHAPE.stages
    ROWS: gl.constexpr = SHAPE.rows
    DIM: gl.constexpr = SHAPE.dim
    last = key_first + (tiles - 1) * SHAPE.keys
    _fetch(k_buffers.index(0), keys, last, key_end, row_stride, SHAPE, True)
    async_copy.commit_group()
    _fetch(v_buffers.index(0), values, last, key_end, row_stride, SHAPE, True)
    for step in gl.static_range(1, STAGES):
        if step < tiles:
            _fetch(k_buffers.index(step), keys, last - step * SHAPE.keys, key_end, row_stride, SHAPE, False)
        async_copy.commit_group()
    q_buffer.store(gl.load(queries, inside, 0.0))
    async_copy.wait_group(SHAPE.stages - 1)
    fence_async_shared()
    gl.thread_barrier()
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(_start_scores(q_buffer, k_buffers.index(0), SHAPE),))
    peak = gl.full((ROWS,), float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros((ROWS,), gl.float32, gl.SliceLayout(1, SCORES))
    numbers, peak, total, fade = _soften(scores, peak, total, last, key_end, position, qk_scale, SHAPE, True)
    acc = gl.zeros((ROWS, DIM), gl.float32, output_layout(SHAPE))
    return _as_weights(numbers, queries.dtype.element_ty, SHAPE), acc, fade, total, peak


@gluon.jit  # type: ignore[untyped-decorator]
def _last_sum(
    tiles: gl.tensor, state: gl.tuple, v_buffers: gl.shared_memory_descriptor, SHAPE: gl.constexpr
) -> gl.tuple:
    """Outputs and base-2 logarithms, in the layout of outputs."""
    weights, acc, fade, total, peak = state
    LINE: gl.constexpr = gl.SliceLayout(1, output_layout(SHAPE))
    async_copy.wait_group(0)
    gl.thread_barrier()
    acc = _start_sum(acc, fade, weights, v_buffers.index((tiles - 1) % 2), SHAPE)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    lse = gl.convert_layout(peak + gl.log2(total), LINE)
    return acc / gl.convert_layout(total, LINE)[:, None], lse


@gluon.jit  # type: ignore[untyped-decorator]
def _attend(
    queries: gl.tensor,
    inside: gl.tensor,
    position: gl.tensor,
    lowest: gl.tensor,
    buffers: gl.tuple,
    memory: gl.tuple,
    qk_scale: gl.tensor,
    SHAPE: gl.constexpr,
) -> gl.tuple:
    """All steps of a tile of queries, the first of them at position `lowest`. Returns what `_last_sum` does."""
    _, _, _, key_first, key_end = memory
    tiles = (key_end - key_first + SHAPE.keys - 1) // SHAPE.keys
    # Below the lowest position every row sees every key.
    masked = tiles - gl.maximum(gl.minimum(lowest + 1, key_end) - key_first, 0) // SHAPE.keys
    state = _first_step(tiles, queries, buffers, memory, inside, position, qk_scale, SHAPE)
    state = _steps(1, masked, tiles, state, buffers, memory, position, qk_scale, SHAPE, True)
    first = gl.maximum(masked, 1)
    state = _steps(first, tiles, tiles, state, buffers, memory, position, qk_scale, SHAPE, False)
    return _last_sum(tiles, state, buffers[2], SHAPE)


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
    SHAPE: gl.constexpr,
    EARLY: gl.constexpr,
) -> None:
    """A program an item of `prefill_tiles.list_tiles` and KV head, as in `ragged_prefill_triton`; qk_scale: log2 e in
    it. Items without queries are left out; others have a key at least. partial: float32 [P · kv_heads, rows, dim], and
    partial_lse, base 2, of items that see a part of their keys."""
    COPY: gl.constexpr = copy_layout(SHAPE)
    OUTPUT: gl.constexpr = output_layout(SHAPE)
    let_next_start(EARLY)
    wait_for_inputs(EARLY)
    head = gl.program_id(0) % SHAPE.kv_heads
    item = items + (gl.program_id(0) // SHAPE.kv_heads) * FIELDS
    first_row, first_token = gl.load(item).to(gl.int32), gl.load(item + 1)
    query_len, start = gl.load(item + 2).to(gl.int32), gl.load(item + 3).to(gl.int32)
    if query_len == 0:
        return
    key_first, key_end, part = gl.load(item + 6).to(gl.int32), gl.load(item + 7).to(gl.int32), gl.load(item + 8)
    keys = payload + head.to(gl.int64) * head_stride + gl.load(item + 4) * row_stride
    memory = keys, keys + kv_stride, row_stride, key_first, key_end
    dtype: gl.constexpr = q.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SHAPE.keys, SHAPE.dim], dtype)
    buffers = (
        gl.allocate_shared_memory(dtype, [SHAPE.rows, SHAPE.dim], SHARED),
        gl.allocate_shared_memory(dtype, [SHAPE.stages, SHAPE.keys, SHAPE.dim], SHARED),
        gl.allocate_shared_memory(dtype, [2, SHAPE.keys, SHAPE.dim], SHARED),
    )
    row = first_row + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, COPY))
    dim = gl.arange(0, SHAPE.dim, layout=gl.SliceLayout(0, COPY))
    token, query_head = first_token + row // SHAPE.group, head * SHAPE.group + row % SHAPE.group
    queries = q + (token * q_token_stride + query_head * q_head_stride)[:, None] + dim[None, :]
    inside = (row // SHAPE.group < query_len)[:, None]
    seen = first_row + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, scores_layout(SHAPE)))
    position = start + seen // SHAPE.group
    lowest = start + first_row // SHAPE.group
    attended, lse = _attend(queries, inside, position, lowest, buffers, memory, qk_scale, SHAPE)
    if part < 0:
        places = out + (token * out_token_stride + query_head * out_head_stride)[:, None] + dim[None, :]
        gl.store(places, gl.convert_layout(attended.to(dtype), COPY), inside)
    else:
        line = (part * SHAPE.kv_heads + head) * SHAPE.rows + gl.arange(0, SHAPE.rows, layout=gl.SliceLayout(1, OUTPUT))
        column = gl.arange(0, SHAPE.dim, layout=gl.SliceLayout(0, OUTPUT))
        gl.store(partial + line[:, None] * SHAPE.dim + column[None, :], attended)
        gl.store(partial_lse + line, lse)


def takes(q: torch.Tensor, kv: KvLayer, window: int | None) -> bool:
    """Whether `launch` can do it, on the layer or on numbers made of its codes: half precision, contiguous memory,
    whole sequences in sight, a Hopper."""
    fits = kv.head_dim in (64, 128) and q.dtype in (torch.float16, torch.bfloat16)
    plain = kv.format.quantized or (not kv.paged and kv.payload.stride(0) * KEYS < 2**31)
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
    shape = Shape(kv.kv_heads, q.shape[1] // kv.kv_heads, kv.head_dim)
    hopper_prefill_kernel[(len(items) * kv.kv_heads,)](
        q, q.stride(0), q.stride(1), out, out.stride(0), out.stride(1), kv.payload, row_stride, kv_stride, head_stride,
        items, partial, partial_lse, scale * math.log2(math.e),
        FIELDS=ITEM_FIELDS, SHAPE=shape, num_warps=WARPS, **early_launch(q.device),
    )  # fmt: skip
