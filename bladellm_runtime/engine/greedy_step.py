"""Sampling that is captured with a decode step: the arg-max of every row, for steps that ask for nothing else."""

import torch
from torch import Tensor

from bladellm_runtime.engine.decode_inputs import DecodeArrays
from bladellm_runtime.engine.sampling_state import Ints, SamplingState


class GreedyStep:
    """Captured sampling: `covers` says on the CPU which steps it may take, `sample` is what is captured for a size.

    The step's other way is the eager `Sampler`, on the same logits. A captured sampler of more requests takes this
    one's place: it needs these two methods and `tokens`, no synchronisation, and a place for the padding slot in what
    it reads and writes by slot.
    """

    def __init__(self, state: SamplingState, last_token: Tensor, max_size: int) -> None:
        self._state = state
        self._last_token = last_token
        self.tokens = torch.zeros(max_size, dtype=torch.int64, device=last_token.device)
        """What the last step sampled, as in `SampleOutputs`."""

    def covers(self, slots: Ints) -> bool:
        """Whether rows of these slots want nothing but the most likely token."""
        return not self._state.flags[slots].any()

    def sample(self, logits: Tensor, arrays: DecodeArrays) -> None:
        """logits: float32 [size, vocabulary] -> `tokens[:size]`, and the next step's tokens by slot."""
        peaks, tokens = logits.max(dim=-1)
        invalid = peaks.isfinite().logical_not_()
        self.tokens[: len(tokens)] = tokens.masked_fill(invalid, -1)
        self._last_token.index_copy_(0, arrays.slots, tokens.masked_fill_(invalid, 0))
