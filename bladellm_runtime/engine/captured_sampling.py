"""Sampling that is captured with a decode step; steps that it does not cover are sampled by `Sampler`."""

from collections import deque
from typing import Protocol

import torch
from bladellm_kernels.sample_step import SampleRows, Stage
from torch import Tensor

from bladellm_runtime.engine.decode_inputs import DecodeArrays
from bladellm_runtime.engine.sampler import Sampler
from bladellm_runtime.engine.sampling_state import LOGPROBS, Ints, SamplingState


class CapturedSampling(Protocol):
    """From a step's logits to its tokens, in one or several *stages*: ways to launch it, each captured on its own.

    tokens: int64 [largest size], what the last step sampled, as in `SampleOutputs`. logits: [slots, vocabulary], what
    the forward pass leaves for it, of the type it reads; steps that are not captured leave theirs there too.
    """

    stages: int
    tokens: Tensor
    logits: Tensor

    def stage(self, slots: Ints) -> int | None:
        """The number of the least stage that rows of these slots need; None where none will do. Called once a step,
        before its replay: what the stage reads of new requests may be uploaded here, on the current stream."""

    def sample(self, stage: int, logits: Tensor, arrays: DecodeArrays) -> None:
        """Captured: logits [size, vocabulary] -> `tokens[:size]`, and to each slot the token it reads next.

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
        self.logits = _logits(state, last_token, max_size, torch.float32)

    def stage(self, slots: Ints) -> int | None:
        return None if self._state.flags_of(slots) else 0

    def sample(self, stage: int, logits: Tensor, arrays: DecodeArrays) -> None:
        peaks, tokens = logits.max(dim=-1)
        invalid = peaks.isfinite().logical_not_()
        self.tokens[: len(tokens)] = tokens.masked_fill(invalid, -1)
        self._last_token.index_copy_(0, arrays.slots, tokens.masked_fill_(invalid, 0))


class KernelSampling:
    """The stages of `sample_step`: every step but those that want log-probabilities."""

    stages = len(Stage)

    def __init__(
        self, state: SamplingState, last_token: Tensor, max_size: int, dtype: torch.dtype, in_flight: int = 2
    ) -> None:
        """dtype: of the model's logits. in_flight: steps, at most."""
        self._state = state
        self._sampler = Sampler(state)
        self._last_token = last_token
        self._uploads: deque[list[Tensor]] = deque(maxlen=in_flight + 2)
        """Host memory that copies may still read: of more steps than can be in flight."""
        self.tokens = torch.zeros(max_size, dtype=torch.int64, device=last_token.device)
        self._feedback = torch.zeros_like(self.tokens)
        self.logits = _logits(state, last_token, max_size, dtype)

    def stage(self, slots: Ints) -> int | None:
        flags = self._state.flags_of(slots)
        if flags & LOGPROBS:
            return None
        self._uploads.append(self._state.flush())
        return int(Stage.of(flags))

    def sample(self, stage: int, logits: Tensor, arrays: DecodeArrays) -> None:
        rows = SampleRows(arrays.sampling_slots, arrays.kv_lens)
        count = len(logits)
        self._sampler.sample_rows(
            logits, rows, self.tokens[:count], self._feedback[:count], self._last_token, Stage(stage)
        )


def _logits(state: SamplingState, last_token: Tensor, max_size: int, dtype: torch.dtype) -> Tensor:
    rows = max(max_size, len(last_token) - 1)
    return torch.zeros(rows, state.vocab_size, dtype=dtype, device=last_token.device)


def captured_sampling(
    state: SamplingState, last_token: Tensor, max_size: int, dtype: torch.dtype, in_flight: int = 2
) -> CapturedSampling:
    """What there is for the device: kernels for all kinds of sampling, or the arg-max. Arguments as in these."""
    if state.parameters is None:
        return GreedySampling(state, last_token, max_size)
    return KernelSampling(state, last_token, max_size, dtype, in_flight)
