"""How many prompt tokens a step takes: few enough for the decodes beside them, more when prompts queue up.

The idea of chunks that fit a bound on TBT is Sarathi-Serve's (Agrawal et al., OSDI 2024); there the number of tokens
is fixed, here it follows from the measured cost of a step, the batch and the queue.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TypeAlias

from bladellm_runtime.scheduler.step_cost import StepCost, padded

MIN_TOKENS = 128
"""A step takes as many prompt tokens in any case: on an H200 it reads the weights for them in the same time."""
STEP_MULTIPLE = 64
"""Kernels work on token counts like this. Steps that are not padded to captured sizes are multiples of it."""
QUEUE_STEPS = 7
"""Bounds in which the prefill of the prompts behind the first has to be done. With 5 small bursts delay the decodes,
with 10 the TTFT and TBT at high load are longer (docs/prefill_chunks.md)."""
BUSY_SHARE = 0.5
"""Of the time that steps have for prompts, what these should take: at 1 a queue grows, near it any burst makes one."""
KEPT_SHARE = 0.7
"""Of the time that prompts have been taking, what steps leave them where the bound leaves less. With more than this TBT
p99 is longer at loads that the bound nearly holds at (docs/prefill_chunks.md)."""
BUSY_BOUNDS = 2.0
"""Bounds that a step may take for that, with one prompt: with 1.5 one of 1,024 tokens never fits."""
STRETCHED_STEPS, STRETCH = 3, 1.1
"""Steps of a prompt, and the bounds that each may take where there is then one less of them. Just above the bound TTFT
would be longer by half or a third for a little of TBT."""
WHOLE_SHARE, MOST_PADDING = 0.5, 1.02
"""Of what fits into a step: whole prompts of so much of it, at least, are taken without a piece of the next one. And
the most tokens, padding with them, for each that such a step is for."""
LEAST_PIECE = 64
"""Tokens with which a prompt begins beside others, if it could be whole: fewer are worth less than what its rest then
takes more."""


@dataclass(frozen=True, slots=True)
class StepBound:
    """`milliseconds`: how long a step with decodes may take while no prompts queue up. `cost`: what steps take."""

    milliseconds: float
    cost: StepCost


@dataclass(frozen=True, slots=True)
class PrefillDemand:
    """Who wants to be in the next step.

    decode_rows, and decode_kv, the KV tokens they read. start, tokens: where the prompt that is first in line stands
    and how much of it is left. queued: prompt tokens of those behind it. load: the share of the time that prompts have
    been taking. behind: prompt tokens of each of the first of those behind it, as many as a step could take.
    """

    decode_rows: int
    decode_kv: int
    start: int
    tokens: int
    queued: int
    load: float = 0.0
    behind: tuple[int, ...] = ()


Allowed: TypeAlias = Callable[[StepBound, float, PrefillDemand], float]
"""Milliseconds that a step may take, by what it takes for decodes."""


def queue_limit(bound: StepBound) -> float:
    """Queued prompt tokens beyond which their exact number does not matter: the bound gives way altogether."""
    one = bound.cost.prefill_milliseconds(1)
    return QUEUE_STEPS * bound.milliseconds / one if one > 0 else 0.0


def prefill_budget(bound: StepBound, demand: PrefillDemand, limit: int) -> int:
    """Prompt tokens for the next step, from 1 to `limit`.

    Without decodes the first prompt goes in whole, and others with it as far as the bound allows. With decodes a
    prompt is cut into equal chunks that keep the bound, or go beyond it where prompts take much of the time, or by
    `STRETCH` where a short prompt then takes a step less: the first one alone, and others beside it no further than the
    bound allows. Either fills the step: it would take as long with padding. But prompts that queue up stay whole where
    that leaves little of it, and none that could be whole begins with a few tokens.
    """
    shared = _tokens_within(bound, demand, _allowed)
    if demand.decode_rows == 0:
        tokens = max(shared, padded(demand.tokens, bound.cost.sizes))
    else:
        alone = _equal_chunk(bound, demand, _stretched(bound, demand, _tokens_within(bound, demand, _allowed_alone)))
        tokens = (_whole_prompts(bound, demand, shared) or max(alone, shared)) if demand.queued else alone
    return _without_scrap(demand, min(tokens, limit))


def _whole_prompts(bound: StepBound, demand: PrefillDemand, room: int) -> int:
    """Where the last prompt ends with which a step has little padding, in the room or beyond it by `STRETCH`, if the
    next one fits into as much: a piece of that would have to be read again with its rest. 0 for none."""
    wide = max(room, _tokens_within(bound, demand, _longer(_allowed)))
    last, end = 0, demand.tokens
    all_known = sum(demand.behind) == demand.queued
    for following in (*demand.behind, 0) if all_known else demand.behind:
        if end > wide:
            break
        total = demand.decode_rows + end
        filled = padded(total, bound.cost.sizes) <= MOST_PADDING * total
        if filled and end >= WHOLE_SHARE * room and following <= room:
            last = end
        end += following
    return last


def _without_scrap(demand: PrefillDemand, tokens: int) -> int:
    """Of so many tokens those without the first few of a prompt that a step of as many takes whole."""
    left = tokens - demand.tokens
    for following in demand.behind:
        if left < following:
            return tokens - left if 0 < left < LEAST_PIECE and following <= tokens else tokens
        left -= following
    return tokens


def _longer(allowed: Allowed) -> Allowed:
    """Steps longer by `STRETCH` than are allowed."""
    return lambda *given: STRETCH * allowed(*given)


def _stretched(bound: StepBound, demand: PrefillDemand, room: int) -> int:
    """What fits into a step longer by `STRETCH` where a prompt of few steps then takes one less, else `room`."""
    chunks = _chunks(demand.tokens, room)
    if not 1 < chunks <= STRETCHED_STEPS:
        return room
    wide = _tokens_within(bound, demand, _longer(_allowed_alone))
    return wide if _chunks(demand.tokens, wide) < chunks else room


def _chunks(tokens: int, room: int) -> int:
    """Into how many a prompt is cut."""
    return -(-tokens // room)


def _tokens_within(bound: StepBound, demand: PrefillDemand, allowed: Allowed) -> int:
    """The most prompt tokens of a step no longer than is allowed, and that fill one, decode rows included; at least
    `MIN_TOKENS`. What is allowed beyond the bound ends at the largest size that steps are padded to."""
    rows, cost = demand.decode_rows, bound.cost
    base = cost.decode_milliseconds(rows, demand.decode_kv)
    # Chunks that take less time than a step does for nothing would cost the prompt more than the decodes gain.
    room = max(allowed(bound, base, demand) - base, cost.step)
    tokens = cost.prefill_tokens(room, demand.start)
    if cost.sizes:
        # Above that the host launches a step operator by operator, which may take it longer than the step takes.
        bounded = cost.prefill_tokens(max(bound.milliseconds - base, cost.step), demand.start)
        tokens = min(tokens, max(bounded, cost.sizes[-1] - rows))
    most = _full(rows + tokens, cost.sizes) - rows
    return most if most >= MIN_TOKENS else padded(rows + MIN_TOKENS, cost.sizes) - rows


def _allowed(bound: StepBound, base: float, demand: PrefillDemand) -> float:
    """Milliseconds that the next step may take.

    The queue is to be done within h = `QUEUE_STEPS` bounds. Steps of t milliseconds, of which `base` is for decodes,
    do h / t · (t - base) of prefill in that time; that is enough when t = base / (1 - prefill / h). Where steps within
    the bound would leave prompts less than `KEPT_SHARE` of the time that these have been taking, they have that
    besides: else a queue would have to stay for prompts to go on as fast.
    """
    horizon = QUEUE_STEPS * bound.milliseconds
    left, kept = 1 - bound.cost.prefill_milliseconds(demand.queued) / horizon, KEPT_SHARE * demand.load
    if demand.queued and base > (1 - kept) * bound.milliseconds:
        left -= kept
    return max(bound.milliseconds, base / left if left > 0 else inf)


def _allowed_alone(bound: StepBound, base: float, demand: PrefillDemand) -> float:
    """The same for a step with tokens of the first prompt only, also before there is a queue: (t - base) / t is what
    steps of t have for prompts, of which these take `BUSY_SHARE` when t = base / (1 - load / `BUSY_SHARE`)."""
    left = 1 - demand.load / BUSY_SHARE
    when_busy = min(base / left if left > 0 else inf, BUSY_BOUNDS * bound.milliseconds)
    return max(_allowed(bound, base, demand), when_busy)


def _equal_chunk(bound: StepBound, demand: PrefillDemand, room: int) -> int:
    """The chunk, `room` at most, with which the prompt takes no more steps, and none of them longer than need be."""
    rows = demand.decode_rows
    chunk = -(-demand.tokens // _chunks(demand.tokens, room))
    return min(_filled(rows + chunk, bound.cost.sizes) - rows, room)


def _full(tokens: int, sizes: Sequence[int]) -> int:
    """The largest full step of no more than so many tokens: at one of the sizes that steps are padded to, ascending,
    or above them, where none is padded, at a multiple of `STEP_MULTIPLE`. 0 where all are larger."""
    if not sizes or tokens >= sizes[-1] + STEP_MULTIPLE:
        return tokens // STEP_MULTIPLE * STEP_MULTIPLE
    index = bisect_right(sizes, tokens)
    return sizes[index - 1] if index else 0


def _filled(tokens: int, sizes: Sequence[int]) -> int:
    """The least full step of no fewer tokens."""
    if sizes and tokens <= sizes[-1]:
        return padded(tokens, sizes)
    return -(-tokens // STEP_MULTIPLE) * STEP_MULTIPLE
