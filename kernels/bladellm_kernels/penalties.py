"""Repetition, presence and frequency penalties over per-slot token statistics, and the update of the statistics.

Repetition (Keskar et al. 2019, "CTRL", in the form all engines use): the logit of a token seen in the prompt or the
output is divided by the penalty when positive, multiplied when negative. Then, as in the OpenAI API, output tokens
only: `logit -= frequency * count + presence * (count > 0)`.
"""

import torch
from torch import Tensor

from bladellm_kernels.row_blocks import row_blocks

COUNT_DTYPE = torch.int16
MAX_COUNT = torch.iinfo(COUNT_DTYPE).max
"""Counts stop here: a token generated 32,767 times is penalised no further."""


def apply_penalties_(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    seen: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Penalise rows of `logits` in place, and return it.

    logits: float32 [R, V]. rows, slots: int64 [P], which rows, and whose statistics. seen: bool [S, V], token in
    prompt or output. counts: int16 [S, V], times in the output. repetition (> 0), presence, frequency: float32 [P].
    """
    if seen.shape[1] != logits.shape[1] or counts.shape != seen.shape:
        raise ValueError(f"statistics {tuple(seen.shape)} do not fit logits {tuple(logits.shape)}")
    for part in row_blocks(rows.shape[0], logits.shape[1], logits.device):
        penalised = _penalised(
            logits.index_select(0, rows[part]),
            seen.index_select(0, slots[part]),
            counts.index_select(0, slots[part]),
            repetition[part, None],
            presence[part, None],
            frequency[part, None],
        )
        logits.index_copy_(0, rows[part], penalised)
    return logits


def count_tokens_(seen: Tensor, counts: Tensor, slots: Tensor, tokens: Tensor) -> None:
    """Add one generated token to each slot's statistics. slots, tokens: int64 [P], slots all different."""
    old = counts[slots, tokens]
    counts.index_put_((slots, tokens), old + (old < MAX_COUNT))
    seen.index_put_((slots, tokens), torch.ones_like(old, dtype=torch.bool))


def reference(
    logits: Tensor, prompt: list[int], output: list[int], repetition: float, presence: float, frequency: float
) -> Tensor:
    """One row's penalties from its token history, token by token. logits: float [V]."""
    result = logits.clone()
    for token in set(prompt) | set(output):
        value = result[token]
        result[token] = value / repetition if value > 0 else value * repetition
    for token in set(output):
        result[token] -= frequency * output.count(token) + presence
    return result


def _penalised(
    logits: Tensor, seen: Tensor, counts: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    factor = torch.where(seen, repetition, 1.0)
    result = torch.where(logits > 0, logits / factor, logits * factor)
    result.sub_(counts * frequency)
    return result.sub_((counts > 0) * presence)
