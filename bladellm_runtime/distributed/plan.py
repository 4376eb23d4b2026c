"""Which part of a model every rank holds: a pure function of the model's shape and the two degrees.

A tensor-parallel rank holds query heads that are neighbours, the KV heads they read, a range of the MLP's inner size
and a range of the vocabulary; a pipeline stage holds a range of layers. All ranks follow one step plan, so the largest
one bounds the step: heads are cut where the *padded* rank, `kv_heads` KV heads of `group` queries each, costs least.
"""

from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from bladellm_runtime.distributed.heads import HeadGroup, cut_heads
from bladellm_runtime.errors import ConfigError

VOCAB_PADDING = 64
"""Rows of the embedding and the head on a rank are a multiple of it."""
NOMINAL_CONTEXT = 2**14
"""Tokens in the KV cache that a decode step is taken to read, in all its sequences together."""
NOMINAL_BATCH = 64
"""Tokens that a decode step is taken to look up in the embedding."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a plan depends on.

    `mlp_unit`: inner channels of the MLP that stay together. It divides `intermediate_size`.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    mlp_unit: int = 1


@dataclass(frozen=True, slots=True)
class RankCut:
    """What a tensor-parallel rank holds of every layer and of the vocabulary: ranges of the whole model.

    `mlp` is empty where there are fewer units than ranks, `vocab` where its padded rows leave none over.
    """

    heads: tuple[HeadGroup, ...]
    mlp: range
    vocab: range

    @property
    def queries(self) -> range:
        """The query heads of the rank, which are neighbours."""
        return range(self.heads[0].queries.start, self.heads[-1].queries.stop)

    @property
    def kv_heads(self) -> range:
        """The KV heads that they read, which are neighbours too."""
        return range(self.heads[0].kv_head, self.heads[-1].kv_head + 1)


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """`ranks`: by tensor-parallel rank. `stages`: the layers of each pipeline stage."""

    ranks: tuple[RankCut, ...]
    stages: tuple[range, ...]

    @property
    def tensor_parallel_size(self) -> int:
        return len(self.ranks)

    @property
    def pipeline_parallel_size(self) -> int:
        return len(self.stages)

    @property
    def kv_heads(self) -> int:
        """KV heads of the padded rank."""
        return max(len(rank.heads) for rank in self.ranks)

    @property
    def group(self) -> int:
        """Query heads that read one KV head of the padded rank."""
        return max(len(group.queries) for rank in self.ranks for group in rank.heads)

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on every rank, padding included."""
        return _round_up(max(len(rank.vocab) for rank in self.ranks), VOCAB_PADDING)


def shard(shape: ModelShape, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> ParallelPlan:
    """The plan of a model for two degrees.

    Raises `ConfigError` for more tensor-parallel ranks than query heads, or more stages than layers.
    """
    _check_degree("--tensor_parallel_size", tensor_parallel_size, shape.heads, "query heads")
    _check_degree("--pipeline_parallel_size", pipeline_parallel_size, shape.layers, "layers")
    degree = tensor_parallel_size

    def cost(kv_heads: int, group: int) -> int:
        return attention_cost(shape, kv_heads, group)

    heads = cut_heads(shape.heads, shape.kv_heads, degree, cost)
    units = cut_evenly(shape.intermediate_size // shape.mlp_unit, degree)
    mlp = [range(part.start * shape.mlp_unit, part.stop * shape.mlp_unit) for part in units]
    ranks = zip(heads, mlp, cut_vocabulary(shape.vocab_size, degree), strict=True)
    return ParallelPlan(tuple(RankCut(*parts) for parts in ranks), cut_layers(shape, pipeline_parallel_size))


def attention_cost(shape: ModelShape, kv_heads: int, group: int) -> int:
    """Numbers that one attention layer reads in a decode step on a rank of that many KV heads and queries of each:
    its rows and columns of the q, k, v and o projections, and the keys and values of `NOMINAL_CONTEXT` tokens."""
    weights = 2 * shape.hidden_size * (kv_heads * group + kv_heads)
    return shape.head_dim * (weights + 2 * NOMINAL_CONTEXT * kv_heads)


def fitting_unit(intermediate_size: int, degree: int, group: int, packing: int, tile: int = 128) -> int:
    """The `mlp_unit` for a `degree`: the largest of the units that kernels like (whole quantization groups and tiles,
    whole groups, whole packed words) that leaves no rank more than an eighth above the mean; the words where none does.

    `packing`: channels of a packed word, which are never parted; 1 for plain weights. A word that does not divide the
    inner size is not packed along it, and counts as 1.
    """
    smallest = packing if intermediate_size % packing == 0 else 1
    for unit in (lcm(group, packing, tile), lcm(group, packing)):
        units = intermediate_size // unit
        if intermediate_size % unit == 0 and -(-units // degree) * degree * 8 <= units * 9:
            return unit
    return smallest


def cut_evenly(count: int, parts: int) -> list[range]:
    """Ranges that cover `count` things, the first ones larger by one where they do not divide."""
    borders = [part * (count // parts) + min(part, count % parts) for part in range(parts + 1)]
    return [range(first, last) for first, last in pairwise(borders)]


def cut_vocabulary(vocab_size: int, degree: int) -> list[range]:
    """The rows of every rank: all but the last ones have as many, a multiple of `VOCAB_PADDING`."""
    rows = _round_up(-(-vocab_size // degree), VOCAB_PADDING)
    borders = [min(rank * rows, vocab_size) for rank in range(degree + 1)]
    return [range(first, last) for first, last in pairwise(borders)]


def cut_layers(shape: ModelShape, stages: int) -> tuple[range, ...]:
    """The layers of every stage: the slowest stage is as fast as can be, the embedding and the head counted."""
    layer = attention_cost(shape, shape.kv_heads, shape.heads // shape.kv_heads)
    layer += 3 * shape.hidden_size * shape.intermediate_size
    costs = [layer] * stages
    costs[0] += NOMINAL_BATCH * shape.hidden_size
    costs[-1] += shape.vocab_size * shape.hidden_size
    counts = [1] * stages
    for _ in range(shape.layers - stages):
        stage = min(range(stages), key=costs.__getitem__)
        counts[stage] += 1
        costs[stage] += layer
    borders = [sum(counts[:stage]) for stage in range(stages + 1)]
    return tuple(range(first, last) for first, last in pairwise(borders))


def _check_degree(flag: str, degree: int, most: int, what: str) -> None:
    if not 1 <= degree <= most:
        raise ConfigError(f"{flag} {degree} is not from 1 to the model's {most} {what}; use {flag} {most} or less")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
