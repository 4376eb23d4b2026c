"""The scheduling policy as pure functions: who runs, who waits, who gives way."""

from collections.abc import Iterable

from bladellm_runtime.scheduler.sequence import Sequence


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


def chunk_tokens(seq: Sequence, budget: int, limit: int) -> int:
    """How many tokens of a prefill the next step takes."""
    return min(seq.prefill_end - seq.planned, budget, limit)


def newest(prefilling: list[Sequence], decoding: list[Sequence]) -> Sequence:
    """The running sequence that arrived last. Both lists are in arrival order; one of them may be empty."""
    last = [sequences[-1] for sequences in (prefilling, decoding) if sequences]
    return max(last, key=lambda seq: seq.order)
