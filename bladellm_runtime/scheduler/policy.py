"""The scheduling policy as pure functions: who runs, who waits, who gives way."""

from collections.abc import Iterable

from bladellm_runtime.scheduler.sequence import Sequence

SHORTER = 2
"""A prompt may overtake one of which more than so many times its tokens are left."""
OVERTAKING_SHARE = 2
"""One in so many of a step's prompt tokens may go to those that overtake: the one in front takes so many times as long
at most."""


def admission_tokens(seq: Sequence) -> int:
    """KV tokens a sequence needs to enter: all it knows, and its first decode token if there will be one."""
    return min(len(seq.tokens) + 1, seq.kv_end)


def headroom(seq: Sequence, running: Iterable[Sequence]) -> int:
    """Granules that must stay obtainable when `seq` enters, so that its admission is not undone at once.

    One for each running sequence that will grow, twice that after the first preemption of `seq`, four times after the
    second, and so on: what is recomputed again and again waits longer for room. It never waits for ever: nothing
    overtakes the head of the queue, and with nothing running this is zero.
    """
    return sum(other.kv_end > other.reserved for other in running) << seq.preemptions


def tokens_left(seq: Sequence) -> int:
    """Prompt tokens that its prefill has still to do; of a waiting sequence all, as if nothing were cached."""
    start, end = seq.prefill_range
    return end - start


def overtakes(seq: Sequence, front: Sequence) -> bool:
    """Whether a prompt is so much shorter than what is left of the one in front that it need not wait for its end."""
    return SHORTER * tokens_left(seq) < tokens_left(front)


def chunk_tokens(seq: Sequence, budget: int, limit: int) -> int:
    """How many tokens of a prefill the next step takes."""
    return min(seq.prefill_end - seq.planned, budget, limit)


def newest(prefilling: list[Sequence], decoding: list[Sequence]) -> Sequence:
    """The running sequence that arrived last. Both lists are in arrival order; one of them may be empty."""
    last = [sequences[-1] for sequences in (prefilling, decoding) if sequences]
    return max(last, key=lambda seq: seq.order)
