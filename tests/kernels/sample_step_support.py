"""Slots with every combination of sampling parameters, and the CUDA kernels of `sample_step` interpreted on the CPU."""

import random
from dataclasses import dataclass, replace

import torch
from bladellm_kernels.gumbel import stream_key
from bladellm_kernels.sample_step import SampleRows, SampleWorkspace, Stage, sample_step
from bladellm_kernels.slot_parameters import (
    BIASED,
    MIN_P,
    PENALISED,
    RANDOM,
    TOP_K,
    TOP_P,
    SlotParameters,
)

ROOM = 300
"""Bias entries of a slot."""


@dataclass(frozen=True)
class Request:
    """What a slot samples with; temperature 0 is greedy. bias, held: logits to change, and to forbid for `min_tokens`
    positions from 0."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    bias: tuple[tuple[int, float], ...] = ()
    held: tuple[int, ...] = ()
    min_tokens: int = 0
    seed: int = 0

    @property
    def flags(self) -> int:
        flags = PENALISED if self.penalties != (1.0, 0.0, 0.0) else 0
        flags |= BIASED if self.bias or self.held else 0
        if not self.temperature:
            return flags
        flags |= RANDOM | (TOP_K if self.top_k else 0)
        return flags | (TOP_P if self.top_p < 1 else 0) | (MIN_P if self.min_p else 0)


def slots_of(requests: list[Request], vocab: int, device: str = "cpu") -> SlotParameters:
    """A slot for each request, and one more that nobody may touch. Statistics are random, also of other slots."""
    slots = SlotParameters.empty(len(requests) + 1, vocab, ROOM, torch.device("cpu"))
    slots.floats.fill_(torch.nan)
    slots.seen.random_(2)
    slots.counts.copy_(torch.randint(3, slots.counts.shape) * slots.seen)
    for slot, request in enumerate(requests):
        slots.flags[slot] = request.flags
        columns = (request.temperature or 1.0, request.top_p, request.min_p, *request.penalties)
        slots.floats[slot] = torch.tensor(columns)
        slots.top_ks[slot] = min(request.top_k or vocab, vocab)
        slots.streams[slot] = torch.tensor(stream_key(request.seed, 0), dtype=torch.int32)
        entries = [*request.bias, *((token, -torch.inf) for token in request.held)]
        slots.bias_counts[slot] = torch.tensor([len(request.bias), len(request.held)])
        slots.free_from[slot] = request.min_tokens
        if entries:
            slots.bias_tokens[slot, : len(entries)] = torch.tensor([token for token, _ in entries], dtype=torch.int32)
            slots.bias_values[slot, : len(entries)] = torch.tensor([value for _, value in entries])
    moved = {name: getattr(slots, name).to(device) for name in slots.__slots__}
    return replace(slots, **moved)


def random_request(rng: random.Random, vocab: int) -> Request:
    def sometimes(value, off, share=0.5):
        return value if rng.random() < share else off

    tokens = rng.sample(range(vocab), min(vocab, ROOM) // 2)
    return Request(
        temperature=sometimes(rng.choice([1e-5, 0.1, 0.7, 1.0, 2.0, 50.0]), 0.0, 0.85),
        top_k=sometimes(rng.choice([1, 2, 7, vocab // 2 + 1, vocab]), 0),
        top_p=sometimes(rng.choice([1e-30, 0.05, 0.5, 0.9, 0.999, 1 - 2.0**-24]), 1.0, 0.6),
        min_p=sometimes(rng.choice([0.02, 0.3, 1.0]), 0.0, 0.3),
        penalties=sometimes((rng.choice([0.7, 1.3]), rng.choice([0.0, 0.5]), rng.choice([0.0, -0.4])), (1.0, 0.0, 0.0)),
        bias=sometimes(tuple((token, rng.uniform(-9, 9)) for token in tokens), (), 0.3),
        held=sometimes(tuple(rng.sample(range(vocab), min(vocab // 2, 5))), (), 0.3),
        min_tokens=rng.choice([0, 50, 100]),
        seed=rng.randrange(-(2**63), 2**63),
    )


def sampled(logits, rows: SampleRows, slots: SlotParameters, launch=None, **options):
    """Tokens, feedback, last tokens and statistics after one step; outputs are poisoned before."""
    device = logits.device
    slots = replace(slots, seen=slots.seen.clone(), counts=slots.counts.clone())
    tokens, feedback = (torch.full((len(logits),), -77, device=device) for _ in range(2))
    last = torch.full((len(slots.flags),), -55, device=device)
    if launch is None:
        sample_step(logits, rows, slots, tokens, feedback, last, **options)
    else:
        launch(logits, rows, slots, outputs=(tokens, feedback), last_token=last, **options)
    return tokens, feedback, last, slots.seen, slots.counts


def poisoned_workspace(rows: int, vocab: int, capacity: int, device: str = "cpu") -> SampleWorkspace:
    workspace = SampleWorkspace.empty(rows, vocab, torch.device(device), capacity)
    for name in workspace.__slots__:
        tensor = getattr(workspace, name)
        tensor.fill_(torch.nan if tensor.is_floating_point() else 0x5A5A5A5A)
    return workspace


def interpreted(logits, rows, slots, capacity=64, stage=Stage.FILTERED, **schedule):
    """The same by the kernels, interpreted. Their exponentials and logarithms are PyTorch's, as they are on CUDA."""
    from bladellm_kernels.sample_triton import SampleSchedule, launch

    use_the_cpus_logarithms()
    workspace = poisoned_workspace(len(logits), logits.shape[1], capacity)
    options = {"workspace": workspace, "stage": stage, "schedule": SampleSchedule(**schedule)}
    return sampled(logits, rows, slots, launch, **options)


def use_the_cpus_logarithms() -> None:
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
    from triton.runtime.interpreter import TensorHandle

    def of_torch(function):
        def call(x):
            values = function(torch.from_numpy(x.handle.data.copy())).numpy()
            return tl.core.tensor(TensorHandle(values, x.handle.dtype), x.type)

        return call

    for name in ("exp", "log", "log1p"):
        setattr(libdevice, name, of_torch(getattr(torch, name)))
