"""RaggedAttention, decode: the newest tokens of each sequence against its KV cache, lengths differing by sequence.

On CUDA the work is cut evenly over the GPU whatever the lengths are (`decode_work.py`). On a CPU the query heads that
share a KV head are passed as that head's queries, so grouped-query attention needs no copy of K and V (`enable_gqa`
would make one, and is many times slower).
"""

import torch
import torch.nn.functional as F

from bladellm_kernels.decode_call import DecodeCall
from bladellm_kernels.decode_work import DecodeWork, DecodeWorkspace
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read

# On a CPU: sequences whose KV exceeds this many elements are read in place, one at a time; below it one padded gather
# costs less than a call per sequence (measured at 2 × 2 heads × 32 dimensions: they meet near 256 tokens).
IN_PLACE_ELEMENTS = 32 * 1024
# Most elements of one padded gather; more sequences are gathered in blocks.
GATHER_ELEMENTS = 64 * 1024 * 1024
MAX_HEAD_DIM = 256


def ragged_decode_attention(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    max_kv_len: int,
    scale: float,
    window: int | None = None,
    query_len: int = 1,
    work: DecodeWork | None = None,
    out: torch.Tensor | None = None,
    beside: bool = False,
) -> torch.Tensor:
    """Attention of the last `query_len` tokens of each of B sequences, each seeing itself and what is before it.

    q: [B · query_len, Hq, D], a sequence's queries in order, the last at position kv_len − 1; D up to 256, a multiple
    of 2 for 8-bit KV and of 4 for 4-bit KV. kv: Hk dividing Hq, unquantized of q's type. base_rows: int64 [B], row of
    position 0; slots: int64 [B], rows of kv.table; kv_lens: int64 [B], tokens in the cache, at least query_len, or 0:
    then nothing is read and the output is zero. max_kv_len ≥ every kv_len, known to the host. window: the newest tokens
    a query sees, all when None. Reads positions [0, kv_len) of each sequence, or those in the window, no others.
    Softmax in float32. work: on CUDA the plan of the step, from `DecodeWorkspace.plan` with the same kv_lens, window
    and query_len; made here when None. beside: the call right before this one on the stream was
    `listed_prefill_attention`, in one pass alone, and this one, where `runs_beside`, is to run beside it; outputs of
    sequences without tokens, which may be rows of that one, are left as they are. Never waits for a CUDA device, and
    can be captured in a CUDA graph.
    Returns [B · query_len, Hq, D] of q's type, in `out` if given.
    """
    _check(q, kv, base_rows, slots, kv_lens, query_len, out)
    out = torch.empty_like(q) if out is None else out
    if q.shape[0] == 0:
        return out
    if q.is_cuda and has_triton():
        from bladellm_kernels.ragged_decode_triton import launch

        work = _work(q, kv, kv_lens, window, query_len, work)
        launch(DecodeCall(q, kv, base_rows, slots, kv_lens, scale, work, out, beside))
        return out
    longest = max_kv_len if window is None else min(max_kv_len, window)
    row_elements = kv.payload[0].numel()
    plain = not (kv.format.quantized or kv.paged or query_len > 1 or bool((kv_lens == 0).any()))
    if not plain or q.shape[0] == 1 or longest * row_elements > IN_PLACE_ELEMENTS:
        _attend_one_by_one(q, kv, base_rows, slots, kv_lens, scale, window, query_len, out, beside)
        return out
    block = max(1, GATHER_ELEMENTS // (longest * row_elements))
    for first in range(0, q.shape[0], block):
        rows = slice(first, first + block)
        _attend_gathered(q[rows], kv.payload, base_rows[rows], kv_lens[rows], longest, scale, out[rows])
    return out


def runs_beside(q: torch.Tensor, kv: KvLayer, work: DecodeWork | None) -> bool:
    """Whether decode attention of queries like q, [n, Hq, D], may be called with `beside`; work: None on a CPU, where
    that means the order alone."""
    if work is None or not (q.is_cuda and has_triton()):
        return True
    from bladellm_kernels import ragged_decode_triton

    return ragged_decode_triton.runs_beside(q, kv, work)


def _work(
    q: torch.Tensor,
    kv: KvLayer,
    kv_lens: torch.Tensor,
    window: int | None,
    query_len: int,
    work: DecodeWork | None,
) -> DecodeWork:
    if work is None:
        batch, (heads, head_dim) = len(kv_lens), q.shape[1:]
        workspace = DecodeWorkspace(
            q.device, batch, heads, kv.kv_heads, head_dim, query_len, kv.format, q.dtype, paged=kv.paged
        )
        return workspace.plan(kv_lens, window, query_len)
    if work.window != window or work.query_len != query_len or len(work.sequences) != len(kv_lens):
        raise ValueError(
            f"the work was planned for {len(work.sequences)} sequences, window {work.window} and {work.query_len} "
            f"queries, not for {len(kv_lens)}, {window} and {query_len}"
        )
    return work


def _attend_one_by_one(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int | None,
    query_len: int,
    out: torch.Tensor,
    beside: bool,
) -> None:
    """One call a sequence, on a view of its KV where it can be one; reads lengths on the host."""
    kv_heads = kv.kv_heads
    grouped = q.unflatten(0, (-1, query_len)).unflatten(2, (kv_heads, -1)).permute(0, 2, 1, 3, 4)
    target = out.unflatten(0, (-1, query_len))
    places = zip(base_rows.tolist(), slots.tolist(), kv_lens.tolist(), strict=True)
    for index, (base, slot, kv_len) in enumerate(places):
        if kv_len == 0:
            if not beside:
                target[index] = 0
            continue
        start = 0 if window is None else max(0, kv_len - query_len + 1 - window)
        k, v = kv_read(kv, base, slot, start, kv_len, q.dtype).permute(1, 2, 0, 3).unsqueeze(1).unbind(0)
        mask = None if query_len == 1 else _causal(kv_len, start, window, grouped[index], k)
        rows = grouped[index].flatten(1, 2).unsqueeze(0)
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        target[index] = attended[0].unflatten(1, (query_len, -1)).transpose(0, 1).flatten(1, 2)


def _causal(kv_len: int, start: int, window: int | None, queries: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Bool [query_len · group, kv_len - start]: which positions from `start` on each row sees; queries
    [Hk, query_len, group, D]."""
    query_len, group = queries.shape[1:3]
    position = torch.arange(kv_len - query_len, kv_len, device=k.device).repeat_interleave(group).unsqueeze(1)
    token = torch.arange(start, kv_len, device=k.device)
    visible = token <= position
    return visible if window is None else visible & (token > position - window)


def _attend_gathered(
    q: torch.Tensor,
    payload: torch.Tensor,
    base_rows: torch.Tensor,
    kv_lens: torch.Tensor,
    longest: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """All sequences at once on a padded copy of the newest `longest` tokens of each."""
    batch, heads, head_dim = q.shape
    kv_heads = payload.shape[2]
    first = base_rows + (kv_lens - longest).clamp_(min=0)
    last = base_rows + kv_lens - 1
    wanted = first.unsqueeze(1) + torch.arange(longest, device=q.device)
    padding = wanted > last.unsqueeze(1)
    rows = torch.minimum(wanted, last.unsqueeze(1))
    gathered = payload.index_select(0, rows.view(-1)).view(batch, longest, 2, kv_heads, head_dim)
    k, v = gathered.permute(2, 0, 3, 1, 4).unbind(0)
    mask = torch.zeros(batch, 1, 1, longest, dtype=q.dtype, device=q.device)
    mask.masked_fill_(padding.view(batch, 1, 1, longest), float("-inf"))
    group = heads // kv_heads
    attended = F.scaled_dot_product_attention(
        q.reshape(batch, kv_heads, group, head_dim), k, v, mask.expand(batch, kv_heads, group, longest), scale=scale
    )
    out.copy_(attended.reshape(batch, heads, head_dim))


def _check(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    query_len: int,
    out: torch.Tensor | None,
) -> None:
    batch, (heads, head_dim) = len(kv_lens), q.shape[1:]
    if q.shape[0] != batch * query_len or base_rows.shape != (batch,) or slots.shape != (batch,):
        raise ValueError(
            f"{batch} sequences of {query_len} queries do not go with queries {tuple(q.shape)}, base rows "
            f"{tuple(base_rows.shape)} and slots {tuple(slots.shape)}"
        )
    if head_dim != kv.head_dim or heads % kv.kv_heads or head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"{heads} query heads of {head_dim} do not go with {kv.kv_heads} KV heads of {kv.head_dim}, or the head "
            f"dimension exceeds {MAX_HEAD_DIM}"
        )
    if kv.payload.dtype != kv.format.dtype(q.dtype) or {base_rows.dtype, slots.dtype, kv_lens.dtype} != {torch.int64}:
        raise ValueError(
            f"queries {q.dtype} do not go with {kv.format.name} KV of {kv.payload.dtype}, or base rows, slots and "
            f"lengths are not int64"
        )
    if (kv.format.quantized or kv.paged) and (kv.table is None or (kv.format.quantized and kv.scales is None)):
        raise ValueError(f"{'paged ' * kv.paged}{kv.format.name} KV needs a table of granules and its scales")
    if out is not None and (out.shape != q.shape or out.dtype != q.dtype):
        raise ValueError(f"out must be like q, {q.dtype} {tuple(q.shape)}, got {out.dtype} {tuple(out.shape)}")
    tensors = (q, kv.payload, q if out is None else out, q if kv.scales is None else kv.scales)
    if any(tensor.stride(-1) != 1 for tensor in tensors) or (kv.table is not None and kv.table.stride(-1) != 1):
        raise ValueError("queries, output, payload, scales and table must be contiguous in the last dimension")


def ragged_decode_attention_reference(
    q: torch.Tensor,
    kv: KvLayer,
    base_rows: torch.Tensor,
    slots: torch.Tensor,
    kv_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    query_len: int = 1,
) -> torch.Tensor:
    """Softmax(q·Kᵀ·scale)·V, one query and head at a time, in float32. Returns float32 [B · query_len, Hq, D]."""
    heads, kv_heads = q.shape[1], kv.kv_heads
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    places = zip(base_rows.tolist(), slots.tolist(), kv_lens.tolist(), strict=True)
    for index, (base, slot, kv_len) in enumerate(places):
        for query in range(query_len if kv_len else 0):
            end = kv_len - query_len + query + 1
            start = 0 if window is None else max(0, end - window)
            k, v = kv_read(kv, base, slot, start, end, torch.float32).unbind(1)
            row = index * query_len + query
            for head in range(heads):
                kv_head = head // (heads // kv_heads)
                weights = torch.softmax(k[:, kv_head] @ q[row, head].float() * scale, 0)
                out[row, head] = weights @ v[:, kv_head]
    return out
