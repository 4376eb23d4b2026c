"""Log-probabilities of given tokens and of the most likely ones, without materialising a log-softmax."""

import torch
from torch import Tensor

from bladellm_kernels.row_blocks import row_blocks
from bladellm_kernels.sampling import top_candidates


def token_logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Log-softmax of `logits` at `tokens` and at the k most likely tokens.

    logits: float32 [R, V]. tokens: int64 [R]. Returns ids int64 and log-probabilities float32, both [R, 1 + k]:
    column 0 is the given token, the rest come best first, equal ones by id. Rows with NaN logits give NaN.
    """
    if not 0 <= k <= logits.shape[1]:
        raise ValueError(f"k must be between 0 and the vocabulary size {logits.shape[1]}, got {k}")
    ids, logprobs = [tokens.new_empty(0, 1 + k)], [logits.new_empty(0, 1 + k)]
    for part in row_blocks(logits.shape[0], logits.shape[1], logits.device):
        block_ids, block_logprobs = _score_block(logits[part], tokens[part, None], k)
        ids.append(block_ids)
        logprobs.append(block_logprobs)
    return torch.cat(ids), torch.cat(logprobs)


def reference(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same by a stable sort of the whole log-softmax in float64."""
    logprobs = logits.double().log_softmax(dim=-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
    ids = torch.cat([tokens[:, None], order], dim=1)
    return ids, logprobs.gather(1, ids)


def _score_block(logits: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    shifted = logits - logits.amax(dim=-1, keepdim=True)
    total = shifted.logsumexp(dim=-1, keepdim=True)
    values = shifted.gather(1, ids)
    if k:
        top_values, top_ids = top_candidates(shifted, k)
        ids, values = torch.cat([ids, top_ids], dim=1), torch.cat([values, top_values], dim=1)
    return ids, values - total
