"""The plan: every head, inner channel, row and layer is somewhere, and the largest rank costs as little as can be."""

import itertools
import random

import pytest

from bladellm_runtime.distributed.plan import (
    VOCAB_PADDING,
    ModelShape,
    ParallelPlan,
    attention_cost,
    cut_layers,
    fitting_unit,
    shard,
)
from bladellm_runtime.errors import UserError
from tests.support.cases import drawn_of

MODELS = {
    "llama-2-7b": ModelShape(32, 32, 32, 128, 4096, 11008, 32000, 64),
    "llama-2-13b": ModelShape(40, 40, 40, 128, 5120, 13824, 32000, 128),
    "llama-2-70b": ModelShape(80, 64, 8, 128, 8192, 28672, 32000, 128),
    "llama-3-8b": ModelShape(32, 32, 8, 128, 4096, 14336, 128256, 128),
    "llama-3.2-1b": ModelShape(16, 32, 8, 64, 2048, 8192, 128256, 128),
    "llama-3.2-3b": ModelShape(28, 24, 8, 128, 3072, 8192, 128256, 128),
    "llama-3-405b": ModelShape(126, 128, 8, 128, 16384, 53248, 128256, 128),
    "qwen2-0.5b": ModelShape(24, 14, 2, 64, 896, 4864, 151936, 128),
    "qwen2-1.5b": ModelShape(28, 12, 2, 128, 1536, 8960, 151936, 128),
    "qwen2.5-7b": ModelShape(28, 28, 4, 128, 3584, 18944, 152064, 128),
    "qwen2.5-14b": ModelShape(48, 40, 8, 128, 5120, 13824, 152064, 128),
    "qwen2.5-72b": ModelShape(80, 64, 8, 128, 8192, 29568, 152064, 128),
    "qwen3-0.6b": ModelShape(28, 16, 8, 128, 1024, 3072, 151936, 128),
    "qwen3-32b": ModelShape(64, 64, 8, 128, 5120, 25600, 151936, 128),
    "mistral-7b": ModelShape(32, 32, 8, 128, 4096, 14336, 32768, 64),
    "bloom-7b1": ModelShape(30, 32, 32, 128, 4096, 16384, 250880),
    "bloom-176b": ModelShape(70, 112, 112, 128, 14336, 57344, 250880),
    "opt-125m": ModelShape(12, 12, 12, 64, 768, 3072, 50272),
    "opt-13b": ModelShape(40, 40, 40, 128, 5120, 20480, 50272),
    "chatglm2-6b": ModelShape(28, 32, 2, 128, 4096, 13696, 65024),
}
DEGREES = range(1, 17)
EVERY = [(name, degree) for name, shape in MODELS.items() for degree in DEGREES if degree <= shape.heads]
CASES = drawn_of(EVERY, 80)


def covered(ranges: list[range]) -> list[int]:
    return list(itertools.chain.from_iterable(ranges))


def padded_cost(shape: ModelShape, plan: ParallelPlan) -> int:
    return attention_cost(shape, plan.kv_heads, plan.group)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_is_on_a_rank(case: tuple[str, int]) -> None:
    name, degree = case
    shape = MODELS[name]
    plan = shard(shape, degree)
    assert plan.tensor_parallel_size == degree
    assert covered([rank.queries for rank in plan.ranks]) == list(range(shape.heads))
    assert covered([group.queries for rank in plan.ranks for group in rank.heads]) == list(range(shape.heads))
    assert covered([rank.mlp for rank in plan.ranks]) == list(range(shape.intermediate_size))
    assert covered([rank.vocab for rank in plan.ranks]) == list(range(shape.vocab_size))
    for rank in plan.ranks:
        assert [group.kv_head for group in rank.heads] == list(rank.kv_heads)
        for group in rank.heads:
            size = shape.heads // shape.kv_heads
            assert len(group.queries) > 0
            assert {query // size for query in group.queries} == {group.kv_head}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_mlp_and_the_vocabulary_are_cut_evenly_at_their_borders(case: tuple[str, int]) -> None:
    name, degree = case
    shape = MODELS[name]
    plan = shard(shape, degree)
    assert all(rank.mlp.start % shape.mlp_unit == 0 for rank in plan.ranks)
    sizes = [len(rank.mlp) for rank in plan.ranks]
    assert max(sizes) - min(sizes) in (0, shape.mlp_unit)
    assert plan.vocab_rows % VOCAB_PADDING == 0
    assert plan.vocab_rows - shape.vocab_size / degree < VOCAB_PADDING
    for number, rank in enumerate(plan.ranks):
        assert rank.vocab.start in (number * plan.vocab_rows, shape.vocab_size)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_heads_are_balanced(case: tuple[str, int]) -> None:
    """Where the degree divides the KV heads, or they the degree, the cut is the equal one; else no rank holds more
    than a whole group beyond its share, and KV heads are nowhere doubled in vain."""
    name, degree = case
    shape = MODELS[name]
    plan = shard(shape, degree)
    size = shape.heads // shape.kv_heads
    if shape.kv_heads % degree == 0:
        assert {(len(rank.heads), len(rank.queries)) for rank in plan.ranks} == {
            (shape.kv_heads // degree, shape.heads // degree)
        }
    if degree % shape.kv_heads == 0:
        assert plan.kv_heads == 1
        assert plan.group == -(-size // (degree // shape.kv_heads))
    assert max(len(rank.queries) for rank in plan.ranks) <= -(-shape.kv_heads // degree) * size
    if degree <= shape.kv_heads:
        assert padded_cost(shape, plan) <= attention_cost(shape, -(-shape.kv_heads // degree), size)


def cheapest(shape: ModelShape, degree: int) -> int:
    """The least padded cost of all ways to cut the row of query heads into so many pieces."""
    size = shape.heads // shape.kv_heads
    costs = []
    for inner in itertools.combinations(range(1, shape.heads), degree - 1):
        borders = [0, *inner, shape.heads]
        pieces = [range(*pair) for pair in itertools.pairwise(borders)]
        counts = [[sum(head // size == kv for head in piece) for kv in range(shape.kv_heads)] for piece in pieces]
        kv_heads = max(sum(count > 0 for count in row) for row in counts)
        costs.append(attention_cost(shape, kv_heads, max(max(row) for row in counts)))
    return min(costs)


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 5), (2, 1), (2, 3), (2, 7), (3, 4), (4, 3), (5, 2), (11, 1)])
def test_no_cut_costs_less(kv_heads: int, size: int) -> None:
    hidden = random.choice((64, 1000, 30000))
    shape = ModelShape(2, kv_heads * size, kv_heads, 64, hidden, 512, 1000)
    for degree in range(1, shape.heads + 1):
        assert padded_cost(shape, shard(shape, degree)) == cheapest(shape, degree)


def test_any_shape_can_be_cut_into_any_degree() -> None:
    for _ in range(60):
        kv_heads, size = random.randint(1, 12), random.randint(1, 9)
        shape = ModelShape(3, kv_heads * size, kv_heads, 8, 96, random.randint(1, 400), random.randint(1, 400))
        degree = random.randint(1, shape.heads)
        plan = shard(shape, degree)
        assert covered([rank.queries for rank in plan.ranks]) == list(range(shape.heads))
        assert all(len(rank.queries) > 0 for rank in plan.ranks)
        assert covered([rank.mlp for rank in plan.ranks]) == list(range(shape.intermediate_size))
        assert covered([rank.vocab for rank in plan.ranks]) == list(range(shape.vocab_size))


@pytest.mark.parametrize("name", MODELS)
def test_no_other_cut_of_the_layers_has_a_faster_slowest_stage(name: str) -> None:
    shape = MODELS[name]
    layer = attention_cost(shape, shape.kv_heads, shape.heads // shape.kv_heads)
    layer += 3 * shape.hidden_size * shape.intermediate_size
    head = shape.vocab_size * shape.hidden_size
    for stages in range(1, min(shape.layers, 6) + 1):
        parts = cut_layers(shape, stages)
        assert covered(list(parts)) == list(range(shape.layers))
        slowest = max(len(part) * layer for part in parts[:-1]) if stages > 1 else 0
        slowest = max(slowest, len(parts[-1]) * layer + head)
        for last in range(1, shape.layers - stages + 2):
            others = -(-(shape.layers - last) // (stages - 1)) * layer if stages > 1 else 0
            if stages > 1 or last == shape.layers:
                assert slowest <= max(others, last * layer + head)


def test_the_head_takes_layers_from_the_last_stage() -> None:
    wide = ModelShape(16, 32, 8, 64, 2048, 8192, 128256)
    first, last = cut_layers(wide, 2)
    assert len(first) > len(last)


@pytest.mark.parametrize("name", MODELS)
def test_refuses_more_ranks_than_heads_and_more_stages_than_layers(name: str) -> None:
    shape = MODELS[name]
    for degree in (shape.heads + 1, 0, -1):
        with pytest.raises(UserError, match=rf"^--tensor_parallel_size {degree} is .* {shape.heads} query heads; use"):
            shard(shape, degree)
    with pytest.raises(UserError, match=rf"^--pipeline_parallel_size {shape.layers + 1} is .* layers; use"):
        shard(shape, 1, shape.layers + 1)
    assert len(shard(shape, shape.heads, shape.layers).ranks) == shape.heads


def test_units_are_the_largest_that_balance() -> None:
    assert fitting_unit(14336, 5, 128, 8) == 128
    assert fitting_unit(11008, 20, 64, 8) == 64  # of 86 tiles over 20 ranks one would have 5, a sixth above the mean
    assert fitting_unit(4864, 16, 128, 8) == 8
    assert fitting_unit(14336, 3, 1, 1) == 128
    assert fitting_unit(100, 3, 1, 8) == 1
    for _ in range(200):
        size, degree = random.randint(1, 4000), random.randint(1, 16)
        unit = fitting_unit(size, degree, random.choice((1, 32, 64, 128)), random.choice((1, 4, 8)))
        assert size % unit == 0
