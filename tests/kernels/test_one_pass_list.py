"""How chunks are shared out among programs of attention in one pass, and what that costs."""

import random
from dataclasses import replace

import pytest
from bladellm_kernels.one_pass_list import _longest, list_programs, one_pass_cost, share_programs
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_routes import one_pass_routes
from bladellm_kernels.prefill_tiles import Span

HEADS = Heads(32, 8, 128)


def step(*chunks: tuple[int, int]) -> tuple[Span, ...]:
    return tuple(Span(9000 * slot, length, start, 0, slot) for slot, (length, start) in enumerate(chunks))


@pytest.mark.parametrize(
    ("chunk", "measured"),
    [
        ((64, 0), 10), ((256, 0), 12), ((512, 0), 15), ((777, 0), 19), ((1000, 0), 24), ((1500, 0), 40),
        ((2048, 0), 62), ((4096, 0), 206), ((8191, 0), 767), ((16384, 0), 3039), ((32768, 0), 12708),
        ((16, 1024), 20), ((64, 1024), 21), ((64, 8192), 96), ((128, 2048), 32), ((300, 777), 22), ((512, 512), 21),
        ((608, 1500), 47), ((1000, 3000), 95), ((2048, 2048), 157), ((2048, 8192), 430), ((2048, 32768), 1573),
    ],
    ids=str,
)  # fmt: skip
def test_costs_are_those_measured_on_an_h200(chunk, measured):
    assert one_pass_cost(HEADS, step(chunk)) == pytest.approx(measured, rel=0.17)


@pytest.mark.parametrize(
    ("heads", "chunk", "measured"),
    [
        ((32, 8), (512, 0), 14), ((32, 8), (1000, 0), 21), ((32, 8), (2048, 0), 49), ((32, 8), (8191, 0), 573),
        ((32, 8), (300, 777), 19), ((32, 8), (2048, 2048), 124), ((14, 2), (512, 0), 14), ((14, 2), (1000, 0), 18),
        ((14, 2), (2048, 0), 27), ((14, 2), (8191, 0), 268), ((14, 2), (300, 777), 19), ((14, 2), (2048, 2048), 61),
    ],
    ids=str,
)  # fmt: skip
def test_heads_of_64_cost_what_was_measured_and_go_in_one_pass(heads, chunk, measured):
    """The Triton kernel took as long or longer, up to 348 µs for 8191 queries of 14 heads."""
    narrow = Heads(*heads, 64)
    assert one_pass_cost(narrow, step(chunk)) == pytest.approx(measured, rel=0.12)
    assert one_pass_routes(step(chunk), narrow)[0].one_pass == step(chunk)


def test_every_chunk_has_programs_and_none_more_than_tiles():
    for _ in range(200):
        heads = Heads(32, random.choice([1, 2, 8, 32]), 128)
        spans = step(
            *((int(3000 ** random.random()), int(9000 ** random.random())) for _ in range(random.randint(1, 150)))
        )
        entries = list_programs(spans, heads, 132)
        assert len(entries) <= max(132, len(spans))
        shares = share_programs(spans, heads, 132)
        assert sorted(span for span, _ in shares) == sorted(spans)
        for span, count in shares:
            own = entries[entries[:, 0] == span.first]
            assert own[:, 4].tolist() == list(range(count))
            assert (own[:, 5] == count).all()
            assert 1 <= count <= -(-span.query_len // 2) * 32


def test_programs_of_a_step_end_at_about_the_same_time():
    for _ in range(50):
        spans = step(*((random.randint(300, 2000), random.randint(0, 3000)) for _ in range(random.randint(1, 6))))
        loads = [_longest(span, HEADS, count) for span, count in share_programs(spans, HEADS, 132)]
        assert max(loads) <= 2 * min(loads) + 20


def test_few_queries_behind_many_keys_are_left_to_the_kernel_that_divides_keys():
    for heads in (HEADS, Heads(14, 2, 64)):
        assert one_pass_routes(step((64, 8192)), heads)[0].stored
    for spans in (step((2048, 0)), step((300, 777)), step((8191, 0)), step(*[(512, 0)] * 4), step((2048, 32768))):
        assert one_pass_routes(spans, HEADS)[0].one_pass == spans
    mixed = step((1000, 0), (16, 60_000), (600, 1500))
    routes = one_pass_routes(mixed, HEADS)[0]
    assert (routes.one_pass, routes.stored) == ((mixed[0], mixed[2]), (mixed[1],))
    assert one_pass_cost(HEADS, ()) == 0.0


def test_the_rest_of_a_prompt_in_codes_is_left_to_the_kernel_that_reads_them_less_often():
    """Making numbers of what it reads takes that kernel longer than a pass over numbers."""
    codes, left = replace(HEADS, quantized=True), {False: 0, True: 0}
    for _ in range(400):
        cuts = [random.choice([0, random.randint(1, 511)]) for _ in range(random.randint(1, 4))]
        spans = step(*((512 - cut, cut) for cut in cuts))
        for heads in (HEADS, codes):
            left[heads.quantized] += bool(one_pass_routes(spans, heads)[0].stored)
    assert left[True] < left[False] / 3
    assert one_pass_routes(step((64, 8192)), codes)[0].stored
