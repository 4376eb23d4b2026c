"""RaggedAttention, prefill: chunks of several query tokens, each against the contiguous KV of its own sequence."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_dequantize import dequantized_layers
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.one_pass_gate import one_pass_takes, one_pass_takes_numbers
from bladellm_kernels.prefill_calls import PlannedCalls
from bladellm_kernels.prefill_costs import SCRATCH_ELEMENTS
from bladellm_kernels.prefill_routes import Routes, choose_routes, one_pass_routes
from bladellm_kernels.prefill_tiles import Span

# Most elements of an explicit mask; longer chunks are attended to in blocks of queries.
MASK_ELEMENTS = 4 * 1024 * 1024


class PrefillChunk(Protocol):
    """A chunk: its first query in the flat batch, its length, the position it starts at, its sequence's row of position
    0, and the sequence's row of `KvLayer.table`."""

    @property
    def first(self) -> int: ...

    @property
    def query_len(self) -> int: ...

    @property
    def start(self) -> int: ...

    @property
    def base_row(self) -> int: ...

    @property
    def slot(self) -> int: ...


def ragged_prefill_attention(
    q: torch.Tensor,
    kv: KvLayer,
    chunks: Sequence[PrefillChunk],
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
    planned: PlannedCalls | None = None,
    fresh: KvLayer | None = None,
) -> torch.Tensor:
    """Causal attention of prefill chunks: position p sees positions 0 to p of its sequence, or the last `window`.

    q: [T, Hq, D], elements of a head contiguous. kv: of q's type or quantized, its heads dividing Hq, already holding
    the chunks' own K and V; only positions [0, start + query_len) of each chunk's sequence count. On CUDA, rows behind
    a chunk's end, up to the end of its last granule, may be set to zero: they must be the sequence's own and hold
    nothing yet (unless two chunks are of one sequence; then they are kept). scale > 0. q may have any rows around it in
    its storage, and is faster with those of `prefill_sdpa.empty_queries`. planned: the calls that cuDNN may be asked
    (`prefill_warm_up`); when None any, of which a new one takes some 45 ms. fresh: unquantized, the step's tokens as
    rows: of chunks with nothing before them it is read in place of kv, where that is possible in one pass.
    Returns [T, Hq, D] of q's type, in `out` if given; tokens outside every chunk are left unwritten. Softmax in
    float32. Never waits for a device.
    """
    _check(q, kv, scale, window, out)
    spans = [Span(each.first, each.query_len, each.start, each.base_row, each.slot) for each in chunks]
    if fresh is not None:
        whole = [span._replace(base_row=span.first) for span in spans if span.start == 0]
        if whole and _takes_fresh(q, fresh, whole, window, out):
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
            ragged_prefill_attention(q, fresh, whole, scale, window, out)
            spans = [span for span in spans if span.start]
            if not spans:
                return out
    if spans and takes_kernels(q, kv):
        return _attend_on_cuda(q, kv, spans, scale, window, out, planned)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for span in spans:
        tokens = slice(span.first, span.first + span.query_len)
        seen_from = 0 if window is None else max(0, span.start - window + 1)
        seen = kv_read(kv, span.base_row, span.slot, seen_from, span.start + span.query_len, q.dtype)
        _attend_chunk(q[tokens], seen, span.start - seen_from, scale, window, out[tokens])
    return out


def _takes_fresh(
    q: torch.Tensor, fresh: KvLayer, spans: Sequence[Span], window: int | None, out: torch.Tensor | None
) -> bool:
    """Whether nothing is written behind chunks, where others of the step are."""
    longest = max(span.query_len for span in spans)
    return not takes_kernels(q, fresh) or one_pass_takes(q, fresh, window, longest, q if out is None else out)


def takes_kernels(q: torch.Tensor, kv: KvLayer) -> bool:
    """Whether the CUDA kernels take the tensors; otherwise plain PyTorch does, on every device."""
    dims = kv.head_dim % 8 == 0 and kv.head_dim <= 256 and q.stride(2) == 1
    return q.is_cuda and dims and has_triton()


def cudnn_takes(
    head_dim: int, dtype: torch.dtype, window: int | None, longest: int, capability: tuple[int, int]
) -> bool:
    """Whether cuDNN (`prefill_sdpa`) can be worth it beside the Triton kernel (`ragged_prefill_triton`).

    cuDNN's kernels for Hopper and later overlap the products with the softmax, which takes a compiler-made kernel to
    some three quarters of their speed. Windows, and float32, which must be exact, are Triton's.
    """
    if capability < (9, 0) or head_dim > 128 or dtype not in (torch.float16, torch.bfloat16):
        return False
    return window is None or window >= longest


def _attend_on_cuda(
    q: torch.Tensor,
    kv: KvLayer,
    spans: list[Span],
    scale: float,
    window: int | None,
    out: torch.Tensor | None,
    planned: PlannedCalls | None,
) -> torch.Tensor:
    from bladellm_kernels import prefill_sdpa, ragged_prefill_triton

    longest = max(span.start + span.query_len for span in spans)
    heads = prefill_sdpa.layer_heads(q, kv)
    if one_pass_takes(q, kv, window, longest, q if out is None else out):
        return _attend_in_one_pass(q, kv, one_pass_routes(tuple(spans), heads)[0], scale, out)
    cudnn = cudnn_takes(kv.head_dim, q.dtype, window, longest, torch.cuda.get_device_capability(q.device))
    alone = out is None and len(spans) == 1 and spans[0].query_len == q.shape[0]
    one_pass = one_pass_takes_numbers(q, kv, window, longest, q if out is None else out)
    piece = prefill_sdpa.longest_piece(kv)
    routes = choose_routes(tuple(spans), heads, cudnn, alone, piece, window, planned, one_pass)
    if alone and routes.cudnn:
        return prefill_sdpa.attend_chunk(q, kv, spans[0], scale, planned=planned)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    for plain, moved in dequantized_layers(kv, routes.dequantized, window, q.dtype, SCRATCH_ELEMENTS):
        if one_pass:
            _attend_in_one_pass(
                q, plain, one_pass_routes(tuple(moved), prefill_sdpa.layer_heads(q, plain))[0], scale, out
            )
        else:
            ragged_prefill_triton.launch(q, plain, moved, scale, window, out)
    if routes.stored:
        ragged_prefill_triton.launch(q, kv, routes.stored, scale, window, out)
    for span in routes.cudnn:
        prefill_sdpa.attend_chunk(q, kv, span, scale, out, planned=planned)
    return out


def _attend_in_one_pass(
    q: torch.Tensor, kv: KvLayer, routes: Routes, scale: float, out: torch.Tensor | None
) -> torch.Tensor:
    from bladellm_kernels import one_pass_prefill, ragged_prefill_triton

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if routes.one_pass:
        one_pass_prefill.launch(q, kv, routes.one_pass, scale, out)
    if routes.stored:
        ragged_prefill_triton.launch(q, kv, routes.stored, scale, None, out)
    return out


def _check(q: torch.Tensor, kv: KvLayer, scale: float, window: int | None, out: torch.Tensor | None) -> None:
    if q.dim() != 3 or q.shape[2] != kv.head_dim or q.shape[1] % kv.kv_heads:
        raise ValueError(f"q {tuple(q.shape)} does not fit {kv.kv_heads} KV heads of {kv.head_dim} dimensions")
    if kv.payload.dtype != kv.format.dtype(q.dtype):
        raise ValueError(
            f"{kv.format.name} KV of {q.dtype} queries is {kv.format.dtype(q.dtype)}, got {kv.payload.dtype}"
        )
    if kv.format.quantized and kv.scales is None:
        raise ValueError(f"the KV format {kv.format.name} needs scales")
    if (kv.format.quantized or kv.paged) and kv.table is None:
        raise ValueError("quantized or paged KV needs a table of granules")
    if scale <= 0 or (window is not None and window < 1):
        raise ValueError(f"scale must be positive and window at least 1, got {scale} and {window}")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype or out.stride(2) != 1):
        raise ValueError(
            f"out must be {q.dtype} {tuple(q.shape)} with contiguous heads, got {out.dtype} {tuple(out.shape)}"
        )


def _attend_chunk(
    q: torch.Tensor, kv: torch.Tensor, start: int, scale: float, window: int | None, out: torch.Tensor
) -> None:
    """One chunk of n queries at positions [start, start + n) against kv [start + n, 2, Hk, D]."""
    total = kv.shape[0]
    if start == 0 and (window is None or window >= total):
        out.copy_(_attend(q, kv, None, scale))
        return
    block = max(1, MASK_ELEMENTS // total)
    for first in range(0, q.shape[0], block):
        queries = q[first : first + block]
        position, end = start + first, start + first + queries.shape[0]
        seen_from = 0 if window is None else max(0, position - window + 1)
        mask = _causal_mask(position, end, seen_from, window, q.device)
        out[first : first + block] = _attend(queries, kv[seen_from:end], mask, scale)


def _causal_mask(first: int, end: int, seen_from: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [end - first, end - seen_from]: True where the query position may see the key position."""
    query = torch.arange(first, end, device=device).unsqueeze(1)
    key = torch.arange(seen_from, end, device=device)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return visible


def _attend(q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """q [n, Hq, D] against kv [m, 2, Hk, D], causal from the top left when there is no mask. Returns [n, Hq, D].

    KV heads take the batch dimension and K and V are expanded over their query heads with stride 0: no copy.
    """
    queries, heads, head_dim = q.shape
    kv_heads = kv.shape[2]
    group = heads // kv_heads
    grouped = q.view(queries, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    k, v = kv.permute(1, 2, 0, 3).unsqueeze(2).expand(2, kv_heads, group, kv.shape[0], head_dim).unbind(0)
    if mask is not None and q.is_cuda and q.dtype == torch.float32:
        return _attend_plainly(grouped, k, v, mask, scale).permute(2, 0, 1, 3).reshape(queries, heads, head_dim)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
    return attended.permute(2, 0, 1, 3).reshape(queries, heads, head_dim)


def _attend_plainly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """Masked attention by matrix products, q [Hk, G, n, D], k and v [Hk, G, m, D]. Returns [Hk, G, n, D].

    The memory-efficient kernel that torch 2.11 takes for masked float32 on CUDA was seen to give wrong results for the
    65th query and later ones of a chunk when several heads share a mask; its half-precision twins are right.
    """
    scores = torch.matmul(q, k.transpose(-1, -2)).mul_(scale).masked_fill_(~mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), v)


def ragged_prefill_attention_reference(
    q: torch.Tensor, kv: KvLayer, chunks: Sequence[PrefillChunk], scale: float, window: int | None = None
) -> torch.Tensor:
    """Softmax(q·Kᵀ·scale)·V, one query token and head at a time, in float32. Returns float32; other tokens are zero."""
    heads = q.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for chunk in chunks:
        seen = kv_read(kv, chunk.base_row, chunk.slot, 0, chunk.start + chunk.query_len, torch.float32)
        for offset in range(chunk.query_len):
            position = chunk.start + offset
            seen_from = 0 if window is None else max(0, position - window + 1)
            k, v = seen[seen_from : position + 1].unbind(1)
            for head in range(heads):
                kv_head = head // (heads // kv.kv_heads)
                weights = torch.softmax(k[:, kv_head] @ q[chunk.first + offset, head].float() * scale, 0)
                out[chunk.first + offset, head] = weights @ v[:, kv_head]
    return out
