"""How prefill chunks are cut into calls, what that is reckoned to cost, and which way each chunk goes."""

import time

import pytest
from bladellm_kernels.prefill_costs import (
    SCRATCH_ELEMENTS,
    Heads,
    fused_is_cheaper,
    kernel_cost,
    merge_cost,
    rectangle_cost,
    square_cost,
)
from bladellm_kernels.prefill_plan import padded_length, plan_chunk, plan_cost
from bladellm_kernels.prefill_routes import choose_routes, cudnn_cost
from bladellm_kernels.prefill_tiles import Span
from hypothesis import given
from hypothesis import strategies as st

HEADS = Heads(32, 8, 128)
INT8 = Heads(32, 8, 128, stored_bytes=1.0, in_place=False, quantized=True)
NARROW, FEW = Heads(32, 8, 64), Heads(14, 2, 64)


def step(*chunks: tuple[int, int]) -> tuple[Span, ...]:
    """Chunks of (query_len, start)."""
    return tuple(Span(10000 * index, *chunk, 500000 * index, index) for index, chunk in enumerate(chunks))


@given(st.integers(1, 40000), st.integers(0, 300000), st.sampled_from([1024, 8192, 65536]), st.sampled_from([1, 8, 40]))
def test_a_plan_covers_the_keys_once_in_few_lengths(query_len, start, longest, heads):
    plan = plan_chunk(Heads(heads, heads, 128), query_len, start, longest)
    assert sum(plan.pieces) == plan.split <= start < plan.split + 512
    assert plan.split % 128 == 0
    assert list(plan.pieces) == sorted(plan.pieces, reverse=True)
    assert all(piece <= longest and piece % 128 == 0 for piece in plan.pieces)
    assert len(plan.pieces) <= plan.split // longest + 5
    for length, padded, share in (
        (start + query_len - plan.split, plan.square, 64),
        (query_len, plan.rows or padded_length(query_len, 8), 8),
    ):
        assert length <= padded < length + max(128, length / share)
        assert padded % 128 == 0
    assert bool(plan.rows) == bool(plan.pieces)


def test_lengths_to_plan_for_are_few():
    assert {padded_length(length, 64) for length in range(1, 8193)} == set(range(128, 8193, 128))
    assert len({padded_length(length, 64) for length in range(8193, 16385)}) == 64
    assert len({padded_length(length, 8) for length in range(1, 8193)}) <= 32
    pieces = {piece for start in range(0, 200000, 128) for piece in plan_chunk(HEADS, 2048, start).pieces}
    assert len(pieces) <= 8 + 4 * 6
    assert all(plan_chunk(HEADS, 2048, start).pieces == (start,) for start in (2048, 4096, 6144, 8192, 10240, 65536))


@pytest.mark.parametrize(
    ("measured", "cost"),
    [
        *((us, square_cost(HEADS, n)) for n, us in ((512, 14), (1024, 32), (2048, 82), (8192, 884), (32768, 12835))),
        *((us, rectangle_cost(HEADS, *shape)) for shape, us in (((2048, 4096), 212), ((2048, 34816), 1677))),
        *((us, rectangle_cost(HEADS, *shape)) for shape, us in (((2048, 133120), 6394), ((64, 8256), 113))),
        *((us, kernel_cost(HEADS, step((n, 0)), True)) for n, us in ((512, 16), (1000, 30), (2048, 91), (8192, 1116))),
        *(
            (us, kernel_cost(HEADS, step((2048, start)), True))
            for start, us in ((2048, 229), (8192, 625), (131072, 8732))
        ),
        (313, kernel_cost(HEADS, step((1500, 5000)), True)),
        (42, kernel_cost(HEADS, step(*[(512, 0)] * 4))),
        (224, kernel_cost(HEADS, step((100, 0), (700, 300), (1200, 3000), (64, 9000)))),
        (508, cudnn_cost(HEADS, *step((2048, 8192)), True)),
        (1685, cudnn_cost(HEADS, *step((2048, 32768)), True)),
        *((us, cudnn_cost(NARROW, *step(chunk), True)) for chunk, us in (((512, 0), 13), ((2048, 0), 61))),
        *((us, cudnn_cost(NARROW, *step(chunk), True)) for chunk, us in (((8191, 0), 632), ((2048, 2048), 152))),
        *((us, cudnn_cost(FEW, *step(chunk), True)) for chunk, us in (((8191, 0), 314), ((2048, 2048), 77))),
        *((us, kernel_cost(FEW, step((n, 0)), True)) for n, us in ((512, 14), (1000, 20), (8191, 348))),
        *((us, kernel_cost(heads, step((300, 777)), True)) for heads, us in ((NARROW, 22), (FEW, 21))),
    ],
)
def test_costs_are_those_measured_on_an_h200(measured, cost):
    assert cost == pytest.approx(measured, rel=0.13)


@given(st.integers(1, 5000), st.integers(0, 20000))
def test_no_other_split_of_a_chunk_costs_less(query_len, start):
    plan = plan_chunk(HEADS, query_len, start)
    square = padded_length(start % 128 + query_len, 64)
    rows = padded_length(query_len, 8)
    split = start // 128 * 128
    if not split:
        assert plan_cost(HEADS, plan) == square_cost(HEADS, square)
        return
    exact = square_cost(HEADS, square) + rectangle_cost(HEADS, rows, split) + merge_cost(HEADS, rows, 2)
    assert plan_cost(HEADS, plan) <= exact + 4 * (merge_cost(HEADS, rows, 2) + rectangle_cost(HEADS, rows, 128))


@pytest.mark.parametrize("alone", [False, True])
def test_large_chunks_go_to_cudnn_and_small_ones_together_to_the_kernel(alone):
    for chunk in ((2048, 0) if alone else (3000, 0), (8191, 0), (2048, 8192), (1500, 32768)):
        assert choose_routes(step(chunk), HEADS, True, alone).cudnn == step(chunk)
        assert choose_routes(step(chunk), HEADS, False, alone).stored == step(chunk)
    for small in ([(64, 131072)], [(100, 0)], [(300, 777)], [(512, 0)] * 4):
        assert choose_routes(step(*small), HEADS, True, alone).stored == step(*small)
    exact = choose_routes(step((2048, 0)), HEADS, True, alone)
    assert bool(exact.cudnn) == alone, "the kernel writes where cuDNN's result would have to be copied to"
    mixed = step((100, 0), (700, 300), (1200, 3000), (64, 9000))
    assert choose_routes(mixed, HEADS, True, False).stored == mixed
    large = step((100, 0), (6000, 3000), (64, 9000))
    assert choose_routes(large, HEADS, True, False) == type(choose_routes(large, HEADS, True, False))(
        large[1:2], (), (large[0], large[2])
    )


chunks = st.lists(st.tuples(st.integers(1, 6000), st.integers(0, 9000)), min_size=1, max_size=5).map(
    lambda pairs: step(*pairs)
)


@given(chunks, st.sampled_from([HEADS, INT8]), st.booleans())
def test_every_chunk_takes_one_way_and_none_is_much_cheaper(spans, heads, alone):
    routes = choose_routes(spans, heads, True, alone)
    assert sorted(routes.cudnn + routes.dequantized + routes.stored) == sorted(spans)
    assert not routes.dequantized or heads.quantized

    def cost(cudnn: tuple[Span, ...]) -> float:
        rest = [span for span in spans if span not in cudnn]
        return sum(cudnn_cost(heads, span, alone) for span in cudnn) + kernel_cost(heads, rest, len(spans) == 1)

    assert cost(routes.cudnn) <= cost(()) + 1e-6
    wide = tuple(span for span in spans if span.query_len >= 384)
    assert cost(routes.cudnn) <= cost(wide) + len(wide) + 1e-6


def test_codes_are_read_as_they_are_for_few_queries_only():
    assert fused_is_cheaper(INT8, *step((1, 8192)))
    assert fused_is_cheaper(INT8, *step((8, 60000)))
    assert not fused_is_cheaper(INT8, *step((64, 8192)))
    assert not fused_is_cheaper(INT8, *step((512, 0)))
    held = SCRATCH_ELEMENTS // (2 * 8 * 128)
    assert not fused_is_cheaper(INT8, *step((64, held - 64)))
    assert fused_is_cheaper(INT8, *step((64, held - 63))), "the buffer is bounded"
    routes = choose_routes(step((512, 300), (2, 9000), (100, 700)), INT8, False, False)
    assert [span.query_len for span in routes.dequantized] == [512, 100]
    assert [span.query_len for span in routes.stored] == [2]


@pytest.mark.parametrize("dim", [128, 64])
def test_numbers_in_one_pass_need_no_cudnn(dim):
    """But for what is not made numbers at once; few queries still read codes."""
    heads = Heads(32, 8, dim, stored_bytes=1.0, in_place=False, quantized=True)
    held = SCRATCH_ELEMENTS // (2 * 8 * dim)
    spans = step((8191, 0), (2048, held - 2048), (2048, held - 2047), (2, 9000))
    assert choose_routes(spans, heads, True, False).cudnn == spans[:3]
    routes = choose_routes(spans, heads, True, False, one_pass=True)
    assert (routes.dequantized, routes.cudnn, routes.stored) == (spans[:2], spans[2:3], spans[3:])


def test_a_window_makes_keys_cheap_to_dequantize():
    spans = step((300, 200000), (20, 100))
    assert choose_routes(spans, INT8, False, False).stored == spans
    assert choose_routes(spans, INT8, False, False, window=4096).dequantized == spans[:1]


def test_chunks_of_one_sequence_are_not_padded_in_its_memory():
    first, second = Span(0, 2048, 0, 0, 3), Span(2048, 2048, 2048, 0, 3)
    assert choose_routes((first, second), HEADS, True, False).cudnn == ()
    apart = second._replace(base_row=9000, slot=4)
    assert choose_routes((first, apart._replace(query_len=6000)), HEADS, True, False).cudnn


def test_many_chunks_are_routed_at_once():
    spans = step(*((400 + index, index) for index in range(512)))
    begin = time.perf_counter()
    choose_routes(spans, INT8, True, False)
    assert time.perf_counter() - begin < 0.5
