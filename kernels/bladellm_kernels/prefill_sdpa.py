"""Large prefill chunks by cuDNN's attention, on lengths from a small set, so that its plans can be kept.

cuDNN takes some 45 ms to plan for each new shape; torch keeps a plan a thread and shape (torch 2.11: the
variable-length form is planned anew at every call, so it is of no use here). A causal operator masks from the top left,
and no operator may multiply rows behind a sequence, where memory can hold NaN or be missing. Hence, with `split` the
multiple of PREFIX_STEP at or before a chunk's start:

  - the square: the queries and keys from `split` to the chunk's end, causal, both padded at the end to a length of 16
    steps an octave. Queries before the chunk and behind it are zeros, of which nothing is used; keys behind it are
    zeros in a copy, seen only by queries that are zeros.
  - the prefix: the chunk's queries, padded to a length of 8 steps an octave, against [0, split) in pieces of powers of
    two, without mask.

The states are merged by their log-sum-exp. Where nothing has to be padded, and memory is neither quantized nor paged,
queries, keys and values are read in place; else keys and values are dequantized piece by piece into a bounded buffer.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from bladellm_kernels.kv_dequantize import kv_dequantize
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.prefill_merge import State, merge_states
from bladellm_kernels.prefill_tiles import Span

PREFIX_STEP = 1024
LONGEST_PIECE = 65536
LENGTH_STEP = 128
SQUARE_STEPS, PREFIX_STEPS = 16, 8
# Elements of K and V dequantized at once, and states kept at once.
SCRATCH_ELEMENTS = 128 * 1024 * 1024
MERGED_AT_ONCE = 8

Sdpa = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], State]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """split: where prefix and square meet; square: rows of the square; rows: queries of the prefix's calls."""

    split: int
    square: int
    rows: int
    pieces: tuple[int, ...]


def plan_chunk(query_len: int, start: int, longest_piece: int = LONGEST_PIECE) -> ChunkPlan:
    """How a chunk is computed; longest_piece: a power of two, at least PREFIX_STEP."""
    split = start // PREFIX_STEP * PREFIX_STEP
    pieces: list[int] = []
    piece = longest_piece
    while (left := split - sum(pieces)) > 0:
        piece = min(piece, 1 << (left.bit_length() - 1))
        pieces.append(piece)
    square = padded_length(start + query_len - split, SQUARE_STEPS)
    return ChunkPlan(split, square, padded_length(query_len, PREFIX_STEPS) if pieces else 0, tuple(pieces))


def padded_length(length: int, steps: int) -> int:
    """`length` rounded up: to multiples of LENGTH_STEP, and of 1/steps of the power of two below it."""
    step = max(LENGTH_STEP, (1 << (length - 1).bit_length()) // (2 * steps))
    return -(-length // step) * step


def attend_chunk(
    q: torch.Tensor,
    kv: KvLayer,
    span: Span,
    scale: float,
    out: torch.Tensor | None = None,
    sdpa: Sdpa | None = None,
) -> torch.Tensor:
    """A chunk of `ragged_prefill_attention`, without window: written to its rows of `out` [T, Hq, D] and returned
    [query_len, Hq, D]; without `out` the result may be the library's own tensor. sdpa: cuDNN's by default.
    """
    sdpa = cudnn_attention if sdpa is None else sdpa
    plan = plan_chunk(span.query_len, span.start, longest_piece(kv))
    lead, end = span.start - plan.split, span.start + span.query_len
    queries = _queries(q, span, lead, plan)
    own = slice(lead, lead + span.query_len)
    state = sdpa(queries[: plan.square], *_stored(kv, span, plan.split, end, plan.square, q.dtype), True, scale)
    states = [state.rows(own.start, own.stop)]
    first = 0
    for piece in plan.pieces:
        if len(states) == MERGED_AT_ONCE:
            states = [merge_states(states)]
        k, v = _stored(kv, span, first, first + piece, piece, q.dtype)
        states.append(sdpa(queries[lead : lead + plan.rows], k, v, False, scale).rows(0, span.query_len))
        first += piece
    target = None if out is None else out[span.first : span.first + span.query_len]
    if len(states) > 1:
        return merge_states(states, target).out
    return states[0].out if target is None else target.copy_(states[0].out)


def longest_piece(kv: KvLayer) -> int:
    """Longest piece of a prefix: in place, 2^31 elements from first to last; dequantized, what the buffer holds."""
    if in_place(kv):
        most = (2**31 - 1) // kv.payload.stride(0)
    else:
        most = SCRATCH_ELEMENTS // (2 * kv.kv_heads * kv.head_dim)
    return max(PREFIX_STEP, min(LONGEST_PIECE, 1 << (most.bit_length() - 1)))


def in_place(kv: KvLayer) -> bool:
    """Whether a sequence's rows are keys and values as an operator takes them."""
    return not kv.format.quantized and not kv.paged


def _queries(q: torch.Tensor, span: Span, lead: int, plan: ChunkPlan) -> torch.Tensor:
    """The chunk's queries behind `lead` zeros, and zeros up to what the plan takes; of q's strides, as plans go by
    strides."""
    own = q[span.first : span.first + span.query_len]
    rows = max(plan.square, lead + plan.rows)
    if rows == span.query_len:
        return own
    padded = torch.empty_strided((rows, *q.shape[1:]), q.stride(), dtype=q.dtype, device=q.device)
    padded[:lead] = 0
    padded[lead : lead + span.query_len] = own
    padded[lead + span.query_len :] = 0
    return padded


def _stored(
    kv: KvLayer, span: Span, first: int, end: int, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [rows, Hk, D] of positions [first, end), with zeros behind them."""
    count = end - first
    if in_place(kv) and count == rows and rows * kv.payload.stride(0) < 2**31:
        stored = kv.payload[span.base_row + first : span.base_row + end]
    else:
        stored = torch.empty(rows, 2, kv.kv_heads, kv.head_dim, dtype=dtype, device=kv.payload.device)
        kv_dequantize(kv, span.base_row, span.slot, first, end, stored[:count])
        stored[count:] = 0
    return stored[:, 0], stored[:, 1]


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> State:
    """q [n, Hq, D] against k, v [m, Hk, D], strided; causal from the top left. The operator itself, whatever back ends
    `scaled_dot_product_attention` may choose from."""
    heads_first = [each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)]
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return State(result[0][0].transpose(0, 1), result[1][0].reshape(q.shape[1], -1).transpose(0, 1))


def warm_up(q: torch.Tensor, kv: KvLayer, chunks: Iterable[tuple[int, int]], scale: float) -> None:
    """Plan for chunks of (query_len, start), in the thread that will run them.

    q: queries of the type, heads and strides to come, of any length. The calls are recorded, never run: nothing is read
    or written, so `kv` may be a layer whose rows hold no memory yet; it must have as many rows as a chunk's keys.
    """
    cudnn_attention(*(torch.zeros(LENGTH_STEP, 1, kv.head_dim, dtype=q.dtype, device=q.device),) * 3, True, scale)
    torch.cuda.synchronize(q.device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for query_len, start in chunks:
            queries = torch.empty_strided((query_len, *q.shape[1:]), q.stride(), dtype=q.dtype, device=q.device)
            attend_chunk(queries, kv, Span(0, query_len, start, 0, 0), scale)
    graph.reset()
