"""Which chunks of a step go to cuDNN's attention, and which to the Triton kernel in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bladellm_kernels.prefill_costs import (
    Heads,
    copy_cost,
    dequantize_cost,
    fused_is_cheaper,
    launch_shares,
    launches_cost,
)
from bladellm_kernels.prefill_plan import LONGEST_PIECE, plan_chunk, plan_cost
from bladellm_kernels.prefill_tiles import Span

# The fewest queries of a chunk for cuDNN, and µs a chunk must gain there: the host takes some 60 µs a call.
LIBRARY_QUERIES = 384
LEAST_GAIN = 1.0


@dataclass(frozen=True, slots=True)
class Routes:
    """Chunks for cuDNN; for the Triton kernel on plain numbers made of codes; and for it on memory as it is."""

    cudnn: tuple[Span, ...] = ()
    dequantized: tuple[Span, ...] = ()
    stored: tuple[Span, ...] = ()


@lru_cache(maxsize=16)
def choose_routes(
    spans: tuple[Span, ...],
    heads: Heads,
    cudnn: bool,
    alone: bool,
    longest_piece: int = LONGEST_PIECE,
    window: int | None = None,
) -> Routes:
    """The cheapest of: some of the largest chunks by cuDNN (if `cudnn` can take any), and the others by Triton.

    alone: the result of an only chunk may be cuDNN's own tensor. window: what a query sees; None or all of it for
    cuDNN. Kept, since all layers of a step ask for the same.
    """
    taken = _cudnn_chunks(spans, heads, alone, longest_piece) if cudnn and not _shared_memory(spans) else set()
    rest = [span for span in spans if span not in taken]
    dequantized = [span for span in rest if heads.quantized and not fused_is_cheaper(heads, _seen(span, window))]
    return Routes(
        tuple(span for span in spans if span in taken),
        tuple(dequantized),
        tuple(span for span in rest if span not in dequantized),
    )


def _cudnn_chunks(spans: Sequence[Span], heads: Heads, alone: bool, longest_piece: int) -> set[Span]:
    """Each chunk less in the launches saves its own share of them, the last one the launch."""
    order = sorted(spans, key=lambda span: -span.query_len * (2 * span.start + span.query_len))
    rests = [(0.0, 0.0)]
    for span in reversed(order):
        fused, plain = launch_shares(heads, span, len(order) == 1)
        rests.append((rests[-1][0] + fused, rests[-1][1] + plain))
    best, least, spent = 0, launches_cost(heads, *rests.pop()), 0.0
    for count, span in enumerate(order, 1):
        if span.query_len < LIBRARY_QUERIES:
            break
        spent += cudnn_cost(heads, span, alone, longest_piece) + LEAST_GAIN
        cost = spent + launches_cost(heads, *rests.pop())
        if cost < least:
            best, least = count, cost
    return set(order[:best])


def cudnn_cost(heads: Heads, span: Span, alone: bool, longest_piece: int = LONGEST_PIECE) -> float:
    """µs of a chunk by `prefill_sdpa`; alone: without a copy of its result."""
    plan = plan_chunk(heads, span.query_len, span.start, longest_piece)
    cost = plan_cost(heads, plan)
    if not heads.in_place:
        cost += dequantize_cost(heads, span.start + span.query_len) + (len(plan.pieces) + 1) * 3.0
    if not alone and not plan.pieces:
        cost += copy_cost(heads, span.query_len)
    return cost


def _seen(span: Span, window: int | None) -> Span:
    """A chunk that has as many keys before it as its first query sees."""
    return span if window is None else span._replace(start=min(span.start, window - 1))


def _shared_memory(spans: Sequence[Span]) -> bool:
    """Whether chunks are of one sequence: then rows behind a chunk may be another's, and not be padding."""
    return len({(span.base_row, span.slot) for span in spans}) < len(spans)
