"""What sampling remembers of each slot: parameters, random stream, and the tokens seen so far."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from bladellm_kernels.gumbel import stream_key
from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.penalties import COUNT_DTYPE, MAX_COUNT
from bladellm_kernels.sample_step import SampleWorkspace
from bladellm_kernels.sampling import CANDIDATES
from bladellm_kernels.slot_parameters import BIASED, MIN_P, PENALISED, RANDOM, TOP_K, TOP_P, SlotParameters
from numpy.typing import NDArray
from torch import Tensor

from bladellm_runtime.engine.upload import Array, upload
from bladellm_runtime.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, SamplingParams
from bladellm_runtime.scheduler.plan import SlotLoad

SORTED, LOGPROBS = 1 << 6, 1 << 7
"""More flags of a slot. SORTED: the candidates of `Filters.width` may not be enough for a filter."""

LEAST_TOP_P = float(np.finfo(np.float32).tiny)
"""A smaller top-p keeps the best token alone just as well; in float32 it could become 0, which keeps none."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SparseBias:
    """Values added to single logits: `always`, or `before_min_tokens` while fewer than `min_tokens` tokens were
    generated, when `ends`, the tokens that could end the request, have -inf."""

    always: tuple[Ints, NDArray[np.float32]]
    before_min_tokens: tuple[Ints, NDArray[np.float32]]
    ends: tuple[Ints, NDArray[np.float32]]

    def entries(self) -> tuple[Ints, NDArray[np.float32]]:
        """Those of `SlotParameters`: what always holds, then `ends`: to add -inf after a bias is to add it alone."""
        (ids, values), (ends, infinite) = self.always, self.ends
        return np.concatenate((ids, ends)), np.concatenate((values, infinite))

    def counts(self) -> tuple[int, int]:
        """How many of each."""
        return len(self.always[0]), len(self.ends[0])


class SamplingState:
    """Sampling parameters and token statistics, indexed by slot.

    On the device: `floats` [slots, 6], `streams` int32 [slots, 2] (the key of the request's random numbers), `top_ks`
    int32 [slots], and for penalised slots `seen` bool and `counts` int16 [slots, vocabulary] (see
    `bladellm_kernels.penalties`). Where the kernels of `sample_step` run, all that they read, `parameters`, and their
    `workspace`; None elsewhere. On the CPU, for planning: `flags`, `prompt_lens`, `min_tokens`, `top_logprobs`,
    `widths` (top-k where it is served from candidates), `biases`.

    A request without a seed gets one from the system's entropy. Ids outside the vocabulary are left out.
    """

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> None:
        self.num_slots = num_slots
        self.vocab_size = vocab_size
        self.device = device
        self.floats = torch.ones(num_slots, 6, dtype=torch.float32, device=device)
        self.streams = torch.zeros(num_slots, 2, dtype=torch.int32, device=device)
        self.top_ks = torch.full((num_slots,), vocab_size, dtype=torch.int32, device=device)
        self.flags = np.zeros(num_slots, dtype=np.uint8)
        self.prompt_lens = np.zeros(num_slots, dtype=np.int64)
        self.min_tokens = np.zeros(num_slots, dtype=np.int64)
        self.top_logprobs = np.zeros(num_slots, dtype=np.int64)
        self.widths = np.zeros(num_slots, dtype=np.int64)
        self.biases: dict[int, SparseBias] = {}
        self._eos = tuple(eos_token_ids)
        self._pending: dict[int, SlotLoad] = {}
        self._united: tuple[Ints, int] | None = None
        self._entropy = random.SystemRandom()
        # A CPU pays for memory when it is touched, a CUDA device when it is allocated: there at the start, in view of
        # the memory table, rather than in the middle of serving.
        self._statistics = None if device.type == "cpu" else self._allocate_statistics()
        self.parameters: SlotParameters | None = None
        self.workspace: SampleWorkspace | None = None
        if device.type == "cuda" and has_triton():
            self.use_kernels()

    def use_kernels(self) -> None:
        """Keep `parameters` and `workspace` from now on."""
        biases = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + len(self._eos)
        others = SlotParameters.empty(self.num_slots, 0, biases, self.device)
        seen, counts = self.statistics
        self.parameters = replace(
            others, floats=self.floats, top_ks=self.top_ks, streams=self.streams, seen=seen, counts=counts
        )
        self.workspace = SampleWorkspace.empty(self.num_slots, self.vocab_size, self.device)

    @property
    def bytes(self) -> int:
        """Device memory held."""
        if self.parameters is not None and self.workspace is not None:
            return self.parameters.nbytes + self.workspace.nbytes
        return sum(tensor.nbytes for tensor in (self.floats, self.streams, self.top_ks, *(self._statistics or ())))

    @property
    def statistics(self) -> tuple[Tensor, Tensor]:
        """`seen` and `counts`."""
        if self._statistics is None:
            self._statistics = self._allocate_statistics()
        return self._statistics

    def load(self, load: SlotLoad) -> None:
        """A request takes a slot, new or resumed. The device is written by the next `flush`."""
        slot, params = load.slot, load.params
        self._pending[slot] = load
        self._united = None
        self.prompt_lens[slot] = load.prompt_len
        self.min_tokens[slot] = params.min_tokens
        self.top_logprobs[slot] = 0 if params.logprobs is None else min(params.logprobs, self.vocab_size)
        top_k = self._top_k(params)
        self.widths[slot] = top_k if top_k <= CANDIDATES and top_k < self.vocab_size else 0
        self.biases.pop(slot, None)
        if params.logit_bias or params.min_tokens:
            self.biases[slot] = self._sparse_bias(params)
        self.flags[slot] = self._flags(slot, params)

    def flags_of(self, slots: Ints) -> int:
        """The flags that any of these slots has; steps of the same rows ask with the same array."""
        if self._united is None or self._united[0] is not slots:
            self._united = slots, int(np.bitwise_or.reduce(self.flags[slots]))
        return self._united[1]

    def flush(self) -> list[Tensor]:
        """Write the loads since the last call to the device, in one copy on the current stream, without waiting.

        Returns the host memory that the copy may still read.
        """
        if not self._pending:
            return []
        loads = list(self._pending.values())
        self._pending = {}
        penalised = [load for load in loads if load.params.penalised]
        arrays = [
            np.array([load.slot for load in loads], dtype=np.int64),
            np.array([_floats(load.params) for load in loads], dtype=np.float32),
            np.array([self._stream(load) for load in loads], dtype=np.int32),
            np.array([self._top_k(load.params) for load in loads], dtype=np.int32),
            *self._more_parameters(loads),
            *(self._histories(penalised) if penalised else ()),
        ]
        (slots, floats, streams, top_ks, *others), pinned = upload(arrays, self.device)
        self.floats.index_copy_(0, slots, floats)
        self.streams.index_copy_(0, slots, streams)
        self.top_ks.index_copy_(0, slots, top_ks)
        if self.parameters is not None:
            _write_parameters(self.parameters, slots, *others[:_MORE])
            others = others[_MORE:]
        if others:
            self._write_histories(*others)
        return [] if pinned is None else [pinned]

    def _allocate_statistics(self) -> tuple[Tensor, Tensor]:
        shape = (self.num_slots, self.vocab_size)
        if self.device.type == "cpu":
            # numpy's zeros are the system's untouched pages: only slots that are penalised take memory.
            return torch.from_numpy(np.zeros(shape, dtype=np.bool_)), torch.from_numpy(np.zeros(shape, dtype=np.int16))
        seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
        return seen, torch.zeros(shape, dtype=COUNT_DTYPE, device=self.device)

    def _more_parameters(self, loads: list[SlotLoad]) -> list[Array]:
        """What `_write_parameters` takes after the slots, for kernels."""
        if self.parameters is None:
            return []
        slots = np.array([load.slot for load in loads])
        biased = [load for load in loads if load.slot in self.biases]
        entries = [self.biases[load.slot].entries() for load in biased]
        width = max((len(tokens) for tokens, _ in entries), default=0)
        tokens, values = np.zeros((len(biased), width), np.int32), np.zeros((len(biased), width), np.float32)
        for row, (of_row, added) in enumerate(entries):
            tokens[row, : len(of_row)], values[row, : len(of_row)] = of_row, added
        counts = np.zeros((len(loads), 2), dtype=np.int32)
        for row, load in enumerate(loads):
            if load.slot in self.biases:
                counts[row] = self.biases[load.slot].counts()
        return [
            self.flags[slots].astype(np.int32),
            counts,
            (self.prompt_lens + self.min_tokens)[slots],
            np.array([load.slot for load in biased], dtype=np.int64),
            tokens,
            values,
        ]

    def _top_k(self, params: SamplingParams) -> int:
        return min(params.top_k, self.vocab_size) if params.top_k > 0 else self.vocab_size

    def _flags(self, slot: int, params: SamplingParams) -> int:
        flags = PENALISED if params.penalised else 0
        flags |= BIASED if slot in self.biases else 0
        flags |= LOGPROBS if params.logprobs is not None else 0
        if params.greedy:
            return flags
        flags |= RANDOM | (TOP_P if params.top_p < 1 else 0) | (MIN_P if params.min_p > 0 else 0)
        flags |= TOP_K if self._top_k(params) < self.vocab_size else 0
        return flags | (SORTED if flags & (TOP_K | TOP_P) and not self.widths[slot] else 0)

    def _stream(self, load: SlotLoad) -> tuple[int, int]:
        seed = self._entropy.getrandbits(63) if load.params.seed is None else load.params.seed
        return stream_key(seed, load.choice)

    def _sparse_bias(self, params: SamplingParams) -> SparseBias:
        biases = {token: bias for token, bias in params.logit_bias.items() if token < self.vocab_size}
        always = _sparse(biases)
        if not params.min_tokens:
            return SparseBias(always, always, _sparse({}))
        ends = dict.fromkeys(
            (token for token in (*self._eos, *params.stop_token_ids) if token < self.vocab_size), -np.inf
        )
        return SparseBias(always, _sparse(biases | ends), _sparse(ends))

    def _histories(self, loads: list[SlotLoad]) -> list[NDArray[np.int64] | NDArray[np.int16]]:
        """For each slot to clear: its number; then (slot, token) of all tokens seen; then (slot, token, count) of the
        output. The counting is done here because equal indices would make the order of device writes matter."""
        seen_slots, seen_tokens, out_slots, out_tokens, out_counts = [], [], [], [], []
        for load in loads:
            tokens = load.ids()
            tokens = np.where((tokens >= 0) & (tokens < self.vocab_size), tokens, -1)
            known = np.unique(tokens[tokens >= 0])
            output = tokens[load.prompt_len :]
            output, counts = np.unique(output[output >= 0], return_counts=True)
            seen_slots.append(np.full(len(known), load.slot))
            seen_tokens.append(known)
            out_slots.append(np.full(len(output), load.slot))
            out_tokens.append(output)
            out_counts.append(np.minimum(counts, MAX_COUNT).astype(np.int16))
        slots = np.array([load.slot for load in loads], dtype=np.int64)
        return [slots, *map(np.concatenate, (seen_slots, seen_tokens, out_slots, out_tokens, out_counts))]

    def _write_histories(
        self,
        slots: Tensor,
        seen_slots: Tensor,
        seen_tokens: Tensor,
        out_slots: Tensor,
        out_tokens: Tensor,
        out_counts: Tensor,
    ) -> None:
        seen, counts = self.statistics
        seen.index_fill_(0, slots, 0)
        counts.index_fill_(0, slots, 0)
        seen.index_put_((seen_slots, seen_tokens), torch.ones_like(seen_slots, dtype=torch.bool))
        counts.index_put_((out_slots, out_tokens), out_counts)


_MORE = 6
"""Arrays of `_more_parameters`."""


def _write_parameters(
    parameters: SlotParameters,
    slots: Tensor,
    flags: Tensor,
    bias_counts: Tensor,
    free_from: Tensor,
    biased: Tensor,
    tokens: Tensor,
    values: Tensor,
) -> None:
    parameters.flags.index_copy_(0, slots, flags)
    parameters.bias_counts.index_copy_(0, slots, bias_counts)
    parameters.free_from.index_copy_(0, slots, free_from)
    if len(biased):
        parameters.bias_tokens[:, : tokens.shape[1]].index_copy_(0, biased, tokens)
        parameters.bias_values[:, : values.shape[1]].index_copy_(0, biased, values)


def _floats(params: SamplingParams) -> tuple[float, ...]:
    return (
        params.temperature,
        max(params.top_p, LEAST_TOP_P),
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
    )


def _sparse(biases: dict[int, float]) -> tuple[Ints, NDArray[np.float32]]:
    return np.array(list(biases), dtype=np.int64), np.array(list(biases.values()), dtype=np.float32)
