"""RaggedAttention, decode: one query token a sequence against its contiguous KV, lengths differing by sequence.

The query heads that share a KV head are passed as that head's queries, so grouped-query attention needs no copy of K
and V (`enable_gqa` would make one, and is many times slower on a CPU).
"""

import torch
import torch.nn.functional as F

# On a CPU: sequences whose KV exceeds this many elements are read in place, one at a time; below it one padded gather
# costs less than a call per sequence (measured at 2 × 2 heads × 32 dimensions: they meet near 256 tokens).
IN_PLACE_ELEMENTS = 32 * 1024
# Most elements of one padded gather; more sequences are gathered in blocks.
GATHER_ELEMENTS = 64 * 1024 * 1024


def ragged_decode_attention(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    base_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv_len: int,
    scale: float,
    window: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of B single query tokens, each the last of its sequence.

    q: [B, Hq, D]; kv_layer: [R, 2, Hk, D] of q's type, Hk dividing Hq; base_rows: int64 [B], row of position 0;
    kv_lens: int64 [B], tokens to attend to, ≥ 1; max_kv_len ≥ every kv_lens, known to the host; window: the newest
    tokens seen, all when None. Reads only rows [base, base + kv_len) of each sequence. Softmax in float32.
    Never waits for a device. Returns [B, Hq, D] of q's type, in `out` if given.
    """
    out = torch.empty_like(q) if out is None else out
    longest = max_kv_len if window is None else min(max_kv_len, window)
    row_elements = kv_layer[0].numel()
    if q.device.type == "cpu" and (q.shape[0] == 1 or longest * row_elements > IN_PLACE_ELEMENTS):
        _attend_in_place(q, kv_layer, base_rows, kv_lens, scale, window, out)
        return out
    block = max(1, GATHER_ELEMENTS // (longest * row_elements))
    for first in range(0, q.shape[0], block):
        rows = slice(first, first + block)
        _attend_gathered(q[rows], kv_layer, base_rows[rows], kv_lens[rows], longest, scale, out[rows])
    return out


def _attend_in_place(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    base_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> None:
    """One call a sequence on a view of its KV; lengths are read on the host, so CPU only."""
    kv_heads, head_dim = kv_layer.shape[2:]
    grouped = q.view(q.shape[0], 1, kv_heads, -1, head_dim)
    for index, (base, kv_len) in enumerate(zip(base_rows.tolist(), kv_lens.tolist(), strict=True)):
        start = 0 if window is None else max(0, kv_len - window)
        k, v = kv_layer[base + start : base + kv_len].permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        attended = F.scaled_dot_product_attention(grouped[index], k, v, scale=scale)
        out[index] = attended.view(-1, head_dim)


def _attend_gathered(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    base_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """All sequences at once on a padded copy of the newest `longest` tokens of each."""
    batch, heads, head_dim = q.shape
    kv_heads = kv_layer.shape[2]
    first = base_rows + (kv_lens - longest).clamp_(min=0)
    last = base_rows + kv_lens - 1
    wanted = first.unsqueeze(1) + torch.arange(longest, device=q.device)
    padding = wanted > last.unsqueeze(1)
    rows = torch.minimum(wanted, last.unsqueeze(1))
    gathered = kv_layer.index_select(0, rows.view(-1)).view(batch, longest, 2, kv_heads, head_dim)
    k, v = gathered.permute(2, 0, 3, 1, 4).unbind(0)
    mask = torch.zeros(batch, 1, 1, longest, dtype=q.dtype, device=q.device)
    mask.masked_fill_(padding.view(batch, 1, 1, longest), float("-inf"))
    group = heads // kv_heads
    attended = F.scaled_dot_product_attention(
        q.reshape(batch, kv_heads, group, head_dim), k, v, mask.expand(batch, kv_heads, group, longest), scale=scale
    )
    out.copy_(attended.reshape(batch, heads, head_dim))


def ragged_decode_attention_reference(
    q: torch.Tensor,
    kv_layer: torch.Tensor,
    base_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Softmax(q·Kᵀ·scale)·V, one sequence and head at a time, in float32. Returns float32 [B, Hq, D]."""
    heads, kv_heads = q.shape[1], kv_layer.shape[2]
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    for index, (base, kv_len) in enumerate(zip(base_rows.tolist(), kv_lens.tolist(), strict=True)):
        start = 0 if window is None else max(0, kv_len - window)
        k, v = kv_layer[base + start : base + kv_len].float().unbind(1)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            weights = torch.softmax(k[:, kv_head] @ q[index, head].float() * scale, 0)
            out[index, head] = weights @ v[:, kv_head]
    return out
