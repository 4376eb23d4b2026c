"""Tokens of two engines that compute the same in another order: equal, but where two tokens are equally good.

Sums in another order differ by a millionth of a logit. Now and then, in one of some hundred thousand tokens, two tokens
are no further apart than that; either may come then, and what follows is another text.
"""

import torch
import transformers

from bladellm_runtime.request import SamplingParams
from tests.engine.sampler_support import Request, expected_scores

ROUNDING = 3e-4
"""Of two logits' difference, at most: thirty times what is usual."""


def assert_alike(
    model: transformers.PreTrainedModel, prompt: list[int], params: SamplingParams, one: list[int], other: list[int]
) -> None:
    """Both are the same as far as both go; else every token of both is the best by transformers' logits, but for
    rounding."""
    length = min(len(one), len(other))
    if one[:length] == other[:length]:
        return
    for tokens in (one, other):
        short = shortfalls(model, prompt, params, tokens)
        assert max(short) <= ROUNDING / (params.temperature or 1.0), (prompt, params, one, other, short)


@torch.inference_mode()
def shortfalls(
    model: transformers.PreTrainedModel, prompt: list[int], params: SamplingParams, tokens: list[int]
) -> list[float]:
    """How far the score of each token is below the best one's, after those before it."""
    logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
    eos = model.generation_config.eos_token_id  # of the demo two tokens, of which its config has one
    ends = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    found = []
    for place, token in enumerate(tokens):
        scores = expected_scores(Request(prompt, params, output=tokens[:place]), logits[place], ends)
        found.append(float(scores.max() - scores[token]))
    return found
