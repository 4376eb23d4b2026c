"""What the scheduler may put into one step and into one sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """`max_batch_tokens`: query tokens of a step. `prefill_chunk_tokens`: prompt tokens of one request in a step.

    `max_model_len` bounds prompt plus answer. `eos_token_ids` end a sequence unless its request ignores them.
    """

    max_batch_tokens: int
    prefill_chunk_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    vocab_size: int
