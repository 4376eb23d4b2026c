"""Large prefill chunks by cuDNN's attention, in the calls of `prefill_plan`, so that its plans can be kept.

cuDNN takes some 45 ms to plan for each new shape; torch keeps a plan a thread and shape (torch 2.11: the
variable-length form is planned anew at every call, so it is of no use here). Queries that pad a call may be anything
that can be read, since what they attend to is dropped: rows beside the chunk in q, where q's storage has them
(`empty_queries`). Keys that pad the square are seen by such queries only, yet must be finite: they are zeros, written
behind the chunk in place where its last granule has room, and else into a copy.

Where memory is neither quantized nor paged, keys and values are read in place; else they are dequantized piece by
piece into a bounded buffer. The states are merged by their log-sum-exp.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch

from bladellm_kernels.kv_dequantize import Stretch, kv_dequantize
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.merge_attention import merge_attention
from bladellm_kernels.prefill_calls import LENGTH_STEP, PlannedCalls, fits_granule, padded
from bladellm_kernels.prefill_costs import SCRATCH_ELEMENTS, Heads
from bladellm_kernels.prefill_plan import LONGEST_LEAD, LONGEST_PIECE, plan_chunk
from bladellm_kernels.prefill_tiles import Span

# States kept at once.
MERGED_AT_ONCE = 8
# Rows behind the queries of `empty_queries`: what pads the last chunk of a step of up to 8192 tokens in planned calls.
ROWS_BEHIND = 2048


class State(NamedTuple):
    """Attention over some keys: out [n, Hq, D], and lse [n, Hq], float32, the natural logarithm of Σ exp(score)."""

    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, first: int, end: int) -> "State":
        return State(self.out[first:end], self.lse[first:end])


Sdpa = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool, float], State]


def empty_queries(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[T, Hq, D], uninitialized, with rows before and behind in its storage, so that no chunk's queries are copied."""
    tokens, heads, head_dim = shape
    rows = torch.empty(LONGEST_LEAD + tokens + ROWS_BEHIND, heads, head_dim, dtype=dtype, device=device)
    return rows[LONGEST_LEAD : LONGEST_LEAD + tokens]


def attend_chunk(
    q: torch.Tensor,
    kv: KvLayer,
    span: Span,
    scale: float,
    out: torch.Tensor | None = None,
    sdpa: Sdpa | None = None,
    aside: bool = True,
    planned: PlannedCalls | None = None,
) -> torch.Tensor:
    """A chunk of `ragged_prefill_attention`, without window: written to its rows of `out` [T, Hq, D] and returned
    [query_len, Hq, D]; without `out` the result may be cuDNN's own tensor. sdpa: cuDNN's by default. aside: the
    square runs beside the prefix, which fills the multiprocessors that its few long rows leave idle. planned: the calls
    to take, any when None; `ValueError` where they do not do.
    """
    sdpa = cudnn_attention if sdpa is None else sdpa
    plan = plan_chunk(layer_heads(q, kv), span.query_len, span.start, longest_piece(kv), planned)
    if plan is None:
        raise ValueError(f"{span.query_len} queries behind {span.start} positions need calls that were not planned")
    lead, end = span.start - plan.split, span.start + span.query_len
    queries = _queries(q, span, lead, max(plan.square, lead + plan.rows))
    with side_stream(q.device, aside and bool(plan.pieces)) as join:
        k, v = _stored(kv, span, plan.split, end, plan.square, q.dtype)
        square = sdpa(queries[: plan.square], k, v, True, scale).rows(lead, lead + span.query_len)
    states = _prefix_states(queries[lead : lead + plan.rows], kv, span, plan.pieces, scale, sdpa)
    join()
    target = None if out is None else out[span.first : span.first + span.query_len]
    if states:
        states.append(square)
        return merge_attention([each.out for each in states], [each.lse for each in states], target)
    return square.out if target is None else target.copy_(square.out)


def _prefix_states(
    queries: torch.Tensor, kv: KvLayer, span: Span, pieces: Iterable[int], scale: float, sdpa: Sdpa
) -> list[State]:
    """Of the pieces of a prefix; merged in between where they are many."""
    states: list[State] = []
    first = 0
    for piece in pieces:
        if len(states) == MERGED_AT_ONCE - 1:
            states = [_merged(states)]
        k, v = _stored(kv, span, first, first + piece, piece, queries.dtype)
        states.append(sdpa(queries, k, v, False, scale).rows(0, span.query_len))
        first += piece
    return states


def _merged(states: Sequence[State]) -> State:
    tokens, heads = states[0].lse.shape
    lse = empty_logs(tokens, heads, states[0].lse.device)
    return State(merge_attention([each.out for each in states], [each.lse for each in states], None, lse), lse)


def empty_logs(tokens: int, heads: int, device: torch.device) -> torch.Tensor:
    """float32 [T, H], uninitialized, laid out as cuDNN's are: they are merged by kernels that are ready."""
    return torch.empty(heads, padded(tokens), dtype=torch.float32, device=device).t()[:tokens]


@contextmanager
def side_stream(device: torch.device, used: bool) -> Iterator[Callable[[], None]]:
    """Run what is within on a stream of its own, behind what the current one has to do; without CUDA, or where not
    `used`, as ever. Gives what lets the current stream wait for it, to be called before results are used.

    Memory is safe without more: what is allocated within is taken again within only, behind the current stream's work
    at that time; what was allocated before must be kept until the join.
    """
    if not used or device.type != "cuda":
        yield lambda: None
        return
    main = torch.cuda.current_stream(device)
    side = _side_stream(device, main.cuda_stream)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield lambda: main.wait_stream(side)


@lru_cache(maxsize=16)
def _side_stream(device: torch.device, main: int) -> torch.cuda.Stream:
    """One beside each stream."""
    return torch.cuda.Stream(device)


def layer_heads(q: torch.Tensor, kv: KvLayer) -> Heads:
    """What the cost of attention depends on, beside lengths."""
    stored = kv.format.number_bytes(q.dtype)
    quantized, itemsize = kv.format.quantized, q.dtype.itemsize
    return Heads(q.shape[1], kv.kv_heads, kv.head_dim, itemsize, stored, in_place(kv), quantized)


def longest_piece(kv: KvLayer) -> int:
    """Longest piece of a prefix: in place, 2^31 elements from first to last; dequantized, what the buffer holds."""
    if in_place(kv):
        most = (2**31 - 1) // kv.payload.stride(0)
    else:
        most = SCRATCH_ELEMENTS // (2 * kv.kv_heads * kv.head_dim)
    return max(LENGTH_STEP, min(LONGEST_PIECE, 1 << (most.bit_length() - 1)))


def in_place(kv: KvLayer) -> bool:
    """Whether a sequence's rows are keys and values as an operator takes them."""
    return not kv.format.quantized and not kv.paged


def _queries(q: torch.Tensor, span: Span, lead: int, rows: int) -> torch.Tensor:
    """`rows` queries of which the chunk's begin at `lead`, and the others are anything; of q's strides, as plans go by
    strides."""
    first = q.storage_offset() + (span.first - lead) * q.stride(0)
    last = first + (rows - 1) * q.stride(0) + (q.shape[1] - 1) * q.stride(1) + q.shape[2] - 1
    if first >= 0 and last < q.untyped_storage().nbytes() // q.dtype.itemsize:
        return q.as_strided((rows, *q.shape[1:]), q.stride(), first)
    copy = torch.empty_strided((rows, *q.shape[1:]), q.stride(), dtype=q.dtype, device=q.device)
    copy[lead : lead + span.query_len] = q[span.first : span.first + span.query_len]
    return copy


def _stored(
    kv: KvLayer, span: Span, first: int, end: int, rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V [rows, Hk, D] of positions [first, end), with zeros behind them."""
    count = end - first
    if in_place(kv) and fits_granule(first + rows, end, kv.granule_tokens) and rows * kv.payload.stride(0) < 2**31:
        stored = kv.payload[span.base_row + first : span.base_row + first + rows]
    else:
        stored = torch.empty(rows, 2, kv.kv_heads, kv.head_dim, dtype=dtype, device=kv.payload.device)
        kv_dequantize(kv, [Stretch(span.base_row, span.slot, first, end)], stored[:count])
    if count < rows:
        stored[count:].zero_()
    return stored[:, 0], stored[:, 1]


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float) -> State:
    """q [n, Hq, D] against k, v [m, Hk, D], strided; causal from the top left. The operator itself, whatever back ends
    `scaled_dot_product_attention` may choose from."""
    heads_first = [each.transpose(0, 1).unsqueeze(0) for each in (q, k, v)]
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first, None, True, 0.0, causal, False, scale=scale
    )
    return State(result[0][0].transpose(0, 1), result[1][0].reshape(q.shape[1], -1).transpose(0, 1))
