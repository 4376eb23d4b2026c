"""Sampling parameters on the device, indexed by slot: where the launches of `sample_step` read them."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bladellm_kernels.penalties import COUNT_DTYPE

RANDOM, TOP_K, TOP_P, MIN_P, PENALISED, BIASED = (1 << bit for bit in range(6))
"""Bits of `SlotParameters.flags`: what a slot's rows need. Filters count only beside RANDOM."""

TEMPERATURE, TOP_P_COLUMN, MIN_P_COLUMN, REPETITION, PRESENCE, FREQUENCY = range(6)
"""Columns of `SlotParameters.floats`."""


@dataclass(frozen=True, slots=True)
class SlotParameters:
    """S slots, V tokens in the vocabulary, room for E logits to change in a slot.

    flags: int32 [S]. floats: float32 [S, 6], the temperature at least 1e-5 where random, top-p above 0. top_ks: int32
    [S], V where off. streams: int32 [S, 2], see `gumbel.stream_key`. seen: bool [S, V], counts: int16 [S, V], see
    `penalties`; used in penalised slots only. bias_tokens: int32 [S, E] and bias_values: float32 [S, E], added to
    single logits: first the bias_counts[:, 0] entries that always hold, then the bias_counts[:, 1] that hold while the
    token to sample is at a position before `free_from` (min_tokens: values -inf); tokens differ within each of the two.
    bias_counts: int32 [S, 2]. free_from: int64 [S].
    """

    flags: Tensor
    floats: Tensor
    top_ks: Tensor
    streams: Tensor
    seen: Tensor
    counts: Tensor
    bias_tokens: Tensor
    bias_values: Tensor
    bias_counts: Tensor
    free_from: Tensor

    @classmethod
    def empty(cls, slots: int, vocab: int, biases: int, device: torch.device) -> "SlotParameters":
        """Greedy slots without penalties or bias."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            flags=zeros(slots),
            floats=torch.ones(slots, 6, device=device),
            top_ks=torch.full((slots,), vocab, dtype=torch.int32, device=device),
            streams=zeros(slots, 2),
            seen=zeros(slots, vocab, dtype=torch.bool),
            counts=zeros(slots, vocab, dtype=COUNT_DTYPE),
            bias_tokens=zeros(slots, biases),
            bias_values=zeros(slots, biases, dtype=torch.float32),
            bias_counts=zeros(slots, 2),
            free_from=zeros(slots, dtype=torch.int64),
        )

    @property
    def nbytes(self) -> int:
        """Device memory held."""
        return sum(getattr(self, each.name).nbytes for each in fields(self))
