"""Sampling that is captured with a decode step; steps that it does not cover are sampled by `Sampler`."""

from typing import Protocol

import torch
from torch import Tensor

from bladellm_runtime.engine.decode_inputs import DecodeArrays
from bladellm_runtime.engine.sampling_state import Ints, SamplingState


class CapturedSampling(Protocol):
    """From a step's logits to its tokens, in one or several *stages*: ways to launch it, each captured on its own.

    tokens: int64 [largest size], what the last step sampled, as in `SampleOutputs`.
    """

    stages: int
    tokens: Tensor

    def stage(self, slots: Ints) -> int | None:
        """The number of the least stage that rows of these slots need; None where none will do. Called once a step,
        before its replay: what the stage reads of new requests may be uploaded here, on the current stream."""

    def sample(self, stage: int, logits: Tensor, arrays: DecodeArrays) -> None:
        """Captured: logits float32 [size, vocabulary] -> `tokens[:size]`, and to each slot the token it reads next.

        Only launches, and reads nothing but static memory. The token to sample has position `arrays.kv_lens`.
        """


class GreedySampling:
    """One stage: the arg-max of every row, for steps that ask for nothing else."""

    stages = 1

    def __init__(self, state: SamplingState, last_token: Tensor, max_size: int) -> None:
        """last_token: int64 [slots + 1], with a place for padding."""
        self._state = state
        self._last_token = last_token
        self.tokens = torch.zeros(max_size, dtype=torch.int64, device=last_token.device)

    def stage(self, slots: Ints) -> int | None:
        return None if self._state.flags[slots].any() else 0

    def sample(self, stage: int, logits: Tensor, arrays: DecodeArrays) -> None:
        peaks, tokens = logits.max(dim=-1)
        invalid = peaks.isfinite().logical_not_()
        self.tokens[: len(tokens)] = tokens.masked_fill(invalid, -1)
        self._last_token.index_copy_(0, arrays.slots, tokens.masked_fill_(invalid, 0))
