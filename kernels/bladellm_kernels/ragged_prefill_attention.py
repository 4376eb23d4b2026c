"""RaggedAttention, prefill: chunks of several query tokens, each against the contiguous KV of its own sequence."""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

# Most elements of an explicit mask; longer chunks are attended to in blocks of queries.
MASK_ELEMENTS = 4 * 1024 * 1024


class PrefillChunk(Protocol):
    """Where a chunk lies: its queries in the flat batch, their first position, and its sequence's row of position 0."""

    first: int
    query_len: int
    start: int
    base_row: int


def ragged_prefill_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    chunks: Sequence[PrefillChunk],
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of prefill chunks: position p sees positions 0 to p of its sequence, or the last `window`.

    q: [T, Hq, D]; kv_layer: [R, 2, Hk, D] of q's type, Hk dividing Hq, already holding the chunks' own K and V. K and V
    are read in place: only rows [base_row, base_row + start + query_len) of each chunk. Returns [T, Hq, D] of q's type,
    in `out` if given; tokens outside every chunk are left unwritten.
    """
    out = torch.empty_like(q) if out is None else out
    for chunk in chunks:
        tokens = slice(chunk.first, chunk.first + chunk.query_len)
        end = chunk.base_row + chunk.start + chunk.query_len
        _attend_chunk(q[tokens], kv_layer[chunk.base_row : end], chunk.start, scale, window, out[tokens])
    return out


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
    q: torch.Tensor, kv_layer: torch.Tensor, chunks: Sequence[PrefillChunk], scale: float, window: int | None = None
) -> torch.Tensor:
    """Softmax(q·Kᵀ·scale)·V, one query token and head at a time, in float32. Returns float32; other tokens are zero."""
    heads, kv_heads = q.shape[1], kv_layer.shape[2]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    for chunk in chunks:
        for offset in range(chunk.query_len):
            position = chunk.start + offset
            seen_from = 0 if window is None else max(0, position - window + 1)
            k, v = kv_layer[chunk.base_row + seen_from : chunk.base_row + position + 1].float().unbind(1)
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                weights = torch.softmax(k[:, kv_head] @ q[chunk.first + offset, head].float() * scale, 0)
                out[chunk.first + offset, head] = weights @ v[:, kv_head]
    return out
