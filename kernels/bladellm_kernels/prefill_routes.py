"""Which chunks of a step go to attention in one pass or to cuDNN's, and which to the Triton kernel in one launch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from bladellm_kernels.one_pass_list import one_pass_cost
from bladellm_kernels.prefill_calls import PlannedCalls
from bladellm_kernels.prefill_costs import (
    Heads,
    copy_cost,
    dequantize_cost,
    fits_scratch,
    fused_is_cheaper,
    kernel_cost,
    launch_shares,
    launches_cost,
)
from bladellm_kernels.prefill_plan import LONGEST_PIECE, plan_chunk, plan_cost
from bladellm_kernels.prefill_tiles import Span

# The fewest queries of a chunk for cuDNN, and µs a chunk must gain there: the host takes some 60 µs a call.
LIBRARY_QUERIES = 384
LEAST_GAIN = 1.0
# Chunks whose keys the Triton kernel may divide beside a launch in one pass of the others, at most.
MOST_APART = 4


@dataclass(frozen=True, slots=True)
class Routes:
    """Chunks for cuDNN; for the Triton kernel on plain numbers made of codes; for it on memory as it is; and
    for attention in one pass."""

    cudnn: tuple[Span, ...] = ()
    dequantized: tuple[Span, ...] = ()
    stored: tuple[Span, ...] = ()
    one_pass: tuple[Span, ...] = ()


@lru_cache(maxsize=16)
def choose_routes(
    spans: tuple[Span, ...],
    heads: Heads,
    cudnn: bool,
    alone: bool,
    longest_piece: int = LONGEST_PIECE,
    window: int | None = None,
    planned: PlannedCalls | None = None,
    one_pass: bool = False,
) -> Routes:
    """The cheapest of: some of the largest chunks by cuDNN (if `cudnn` can take any), and the others by Triton.

    alone: the result of an only chunk may be cuDNN's own tensor. window: what a query sees; None or all of it for
    cuDNN. planned: what cuDNN may be asked; anything when None. one_pass: numbers made of codes are attended to in one
    pass, which cuDNN does not better, but for longer prefixes than are made at once. Kept, since all layers of a step
    ask for the same.
    """
    cost = partial(cudnn_cost, heads, alone=alone, longest_piece=longest_piece, planned=planned)
    asked = [span for span in spans if not (one_pass and fits_scratch(heads, span))]
    taken = _cudnn_chunks(asked, heads, cost) if cudnn and not _shared_memory(spans) else set()
    rest = [span for span in spans if span not in taken]
    dequantized = [span for span in rest if heads.quantized and not fused_is_cheaper(heads, _seen(span, window))]
    return Routes(
        tuple(span for span in spans if span in taken),
        tuple(dequantized),
        tuple(span for span in rest if span not in dequantized),
    )


@lru_cache(maxsize=16)
def one_pass_routes(spans: tuple[Span, ...], heads: Heads) -> tuple[Routes, ...]:
    """The cheapest first: all chunks in one pass, all by Triton, and by Triton those behind the longest prefixes, whose
    keys it divides where their queries are few. On memory that can be read in one pass, without window."""
    order = sorted(spans, key=lambda span: -span.start)
    counts = {*range(min(len(spans), MOST_APART) + 1), len(spans)}

    def cost(count: int) -> float:
        return kernel_cost(heads, order[:count], count == 1) + one_pass_cost(heads, order[count:])

    return tuple(_parted(spans, set(order[:count])) for count in sorted(counts, key=cost))


def _parted(spans: Sequence[Span], apart: set[Span]) -> Routes:
    stored = tuple(span for span in spans if span in apart)
    return Routes(stored=stored, one_pass=tuple(span for span in spans if span not in apart))


def _cudnn_chunks(spans: Sequence[Span], heads: Heads, cost_of: Callable[[Span], float]) -> set[Span]:
    """Each chunk less in the launches saves its own share of them, the last one the launch."""
    costs = {span: cost_of(span) for span in spans if span.query_len >= LIBRARY_QUERIES}
    order = sorted((span for span in costs if costs[span] < math.inf), key=_scores, reverse=True)
    fused = plain = 0.0
    rests: list[tuple[float, float]] = []
    for span in [*(span for span in spans if costs.get(span, math.inf) == math.inf), *reversed(order)]:
        rests.append((fused, plain))
        of_fused, of_plain = launch_shares(heads, span, len(spans) == 1)
        fused, plain = fused + of_fused, plain + of_plain
    best, least, spent = 0, launches_cost(heads, fused, plain), 0.0
    for count, span in enumerate(order, 1):
        spent += costs[span] + LEAST_GAIN
        cost = spent + launches_cost(heads, *rests.pop())
        if cost < least:
            best, least = count, cost
    return set(order[:best])


def _scores(span: Span) -> int:
    """Twice the scores of a chunk, about."""
    return span.query_len * (2 * span.start + span.query_len)


def cudnn_cost(
    heads: Heads, span: Span, alone: bool, longest_piece: int = LONGEST_PIECE, planned: PlannedCalls | None = None
) -> float:
    """µs of a chunk by `prefill_sdpa`, infinite without plans for it; alone: without a copy of its result."""
    plan = plan_chunk(heads, span.query_len, span.start, longest_piece, planned)
    if plan is None:
        return math.inf
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
