"""Log-probabilities of prompt tokens, in blocks: a long prompt times a large vocabulary must not be held at once."""

from dataclasses import dataclass

import torch

from bladellm_runtime.engine.inputs import PromptScore
from bladellm_runtime.models.decoder import Decoder
from bladellm_runtime.wire.messages import TokenLogprobs

BLOCK_ELEMENTS = 2**25
"""Logits held at once, in elements (128 MiB of float32)."""


@dataclass(slots=True)
class ScoredPrompt:
    """Device results for one `PromptScore`: ids and log-probabilities, `[targets, 1 + top]`, the target first."""

    row: int
    ids: torch.Tensor
    logprobs: torch.Tensor

    def to_host(self) -> list[TokenLogprobs]:
        """Read the values; waits for tensors still on the device."""
        return [
            TokenLogprobs(ids, values) for ids, values in zip(self.ids.tolist(), self.logprobs.tolist(), strict=True)
        ]


def score_prompts(model: Decoder, hidden: torch.Tensor, scores: list[PromptScore]) -> list[ScoredPrompt]:
    """`hidden` [sum of targets, hidden size] holds the final hidden states of the scored tokens, in order."""
    scored: list[ScoredPrompt] = []
    first = 0
    for score in scores:
        count = len(score.targets)
        if score.wanted is None:
            raise RuntimeError(f"the targets of row {score.row} were never uploaded")
        ids, values = _score(model, hidden[first : first + count], score.wanted, score.top)
        scored.append(ScoredPrompt(score.row, ids, values))
        first += count
    return scored


def _score(model: Decoder, hidden: torch.Tensor, targets: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    block = max(1, BLOCK_ELEMENTS // model.spec.vocab_size)
    ids, values = [], []
    for part, wanted in zip(hidden.split(block), targets.split(block), strict=True):
        logprobs = model.logits(part).log_softmax(dim=-1)
        best = logprobs.topk(top, dim=-1)
        ids.append(torch.cat([wanted[:, None], best.indices], dim=1))
        values.append(torch.cat([logprobs.gather(1, wanted[:, None]), best.values], dim=1))
    return torch.cat(ids), torch.cat(values)
