"""Random problems of decode attention in the GPU's memory, for the benchmarks."""

import random
from dataclasses import dataclass

import torch
from bladellm_kernels.kv_format import KvFormat
from bladellm_kernels.kv_layer import KvLayer

COLD_BYTES = 256 * 2**20
"""What calls read in turn, so that the L2 cache (60 MB on an H200) holds nothing useful."""
MOST_CALLS = 64
LEAST_CALLS = 8
"""Of a graph, so that what starting a graph takes does not count."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Calls read `layers` interleaved layers of each of `copies` memories in turn, again and again."""

    heads: int
    kv_heads: int
    head_dim: int
    lens: tuple[int, ...]
    format: KvFormat
    dtype: torch.dtype
    layers: int
    granule_tokens: int
    paged: bool

    @property
    def payload_bytes(self) -> int:
        stored = self.format.width(self.head_dim) * self.format.dtype(self.dtype).itemsize
        return sum(self.lens) * self.kv_heads * 2 * stored

    @property
    def read_bytes(self) -> int:
        return self.payload_bytes + sum(self.lens) * self.kv_heads * 2 * self.format.planes * 2

    @property
    def rows(self) -> int:
        """Rows of memory: every sequence rounded up to whole granules."""
        return sum(-(-length // self.granule_tokens) for length in self.lens) * self.granule_tokens

    @property
    def calls(self) -> int:
        return max(LEAST_CALLS, min(MOST_CALLS, -(-COLD_BYTES // self.payload_bytes)))

    @property
    def copies(self) -> int:
        cold = max(1, min(MOST_CALLS, -(-COLD_BYTES // self.payload_bytes)))
        return -(-cold // self.layers)

    @property
    def memory_bytes(self) -> int:
        rows = self.rows * self.layers * self.copies
        return rows * self.kv_heads * 2 * (self.payload_bytes // (sum(self.lens) * self.kv_heads * 2) + 4)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a problem; `kv` holds a layer for each call."""

    q: torch.Tensor
    kv: list[KvLayer]
    base_rows: torch.Tensor
    slots: torch.Tensor
    kv_lens: torch.Tensor
    out: torch.Tensor


def lengths(size: str) -> tuple[int, ...]:
    """`BxN`, `BxM-N` (random lengths), or `mix`: 64 sequences, few of them long; small for a CPU's sake where the name
    ends in a number."""
    if size.startswith("mix"):
        longest = int(size[3:] or 32768)
        generator = random.Random(0)
        return tuple(max(1, int(longest * generator.random() ** 4)) for _ in range(64))
    batch, tokens = size.split("x")
    least, _, most = tokens.partition("-")
    generator = random.Random(0)
    return tuple(generator.randint(int(least), int(most or least)) for _ in range(int(batch)))


def make_inputs(problem: Problem, device: torch.device) -> Inputs:
    granule = problem.granule_tokens
    counts = [-(-length // granule) for length in problem.lens]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    names, starts = torch.randperm(sum(counts)).int(), torch.tensor([0, *counts]).cumsum(0)
    for slot, count in enumerate(counts):
        table[slot, :count] = names[starts[slot] : starts[slot] + count]
    table = table.to(device)
    layers: list[KvLayer] = []
    for _ in range(problem.copies):
        memory = random_memory(problem, device)
        for layer in range(problem.layers):
            payload = memory[:, layer].transpose(1, 2)
            scales = random_scales(problem, sum(counts), device)
            layers.append(KvLayer(payload, problem.format, granule, table, scales, problem.paged))
    q = torch.randn(len(counts), problem.heads, problem.head_dim, device=device).to(problem.dtype)
    return Inputs(
        q,
        [layers[call % len(layers)] for call in range(problem.calls)],
        (starts[:-1] * granule).to(device),
        torch.arange(len(counts), device=device),
        torch.tensor(problem.lens, device=device),
        torch.empty_like(q),
    )


def random_memory(problem: Problem, device: torch.device) -> torch.Tensor:
    """[rows, layers, Hk, 2, W], a row as arenas lay it out."""
    width = problem.format.width(problem.head_dim)
    shape = (problem.rows, problem.layers, problem.kv_heads, 2, width)
    stored = problem.format.dtype(problem.dtype)
    if stored.itemsize > 1:
        return torch.empty(shape, dtype=stored, device=device).normal_()
    # No byte of these is a NaN of a float8.
    return torch.empty(shape, dtype=torch.uint8, device=device).random_(0, 120).view(stored)


def random_scales(problem: Problem, granules: int, device: torch.device) -> torch.Tensor | None:
    if not problem.format.quantized:
        return None
    shape = (granules, problem.kv_heads, 2, problem.format.planes, problem.granule_tokens)
    return torch.empty(shape, dtype=torch.float16, device=device).uniform_(0.01, 0.02)
