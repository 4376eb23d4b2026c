"""Chunks with nothing before them, attended to on keys and values as they were computed."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from bladellm_kernels import listed_prefill_attention as listed_module
from bladellm_kernels import listed_scratch
from bladellm_kernels import ragged_prefill_attention as module
from bladellm_kernels.hopper_device import is_hopper
from bladellm_kernels.kv_dequantize import BLOCK_TOKENS
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_write import kv_write
from bladellm_kernels.listed_prefill_attention import (
    ListShape,
    ListViews,
    fill_list,
    list_shape,
    list_views,
    listed_prefill_attention,
    one_pass_alone,
)
from bladellm_kernels.listed_scratch import SEEN_ROWS, most_blocks, place_chunks
from bladellm_kernels.one_pass_gate import attends_fresh
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_routes import Routes
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention, ragged_prefill_attention_reference

from tests.kernels.conditions import DEVICES, assert_close

HEADS = Heads(6, 2, 64, quantized=True)
GRANULE = 16
FORMAT = KV_FORMATS["fp12_e4m7"]


def problem(spans: list[tuple[int, int]], device: str) -> tuple[torch.Tensor, KvLayer, KvLayer, list[Span]]:
    """Queries; memory of 12 bits with all that chunks of (start, length) see; what was computed of their own tokens,
    behind two of no chunk; the chunks."""
    if device == "cuda" and not is_hopper(torch.device(device)):
        pytest.skip("attention in one pass needs a Hopper")
    total = sum(start + length for start, length in spans)
    granules = len(spans) * (max(start + length for start, length in spans) // GRANULE + 1)
    table = torch.randperm(granules, device=device).view(len(spans), -1).int()
    payload = torch.zeros(total, 2, HEADS.kv, FORMAT.width(HEADS.dim), dtype=torch.uint8, device=device)
    scales = torch.full((granules, HEADS.kv, 2, 1, GRANULE), torch.nan, dtype=torch.float16, device=device)
    kv = KvLayer(payload, FORMAT, GRANULE, table, scales)
    tokens = 2 + sum(length for _, length in spans)
    qkv = torch.randn(tokens, HEADS.query + 2 * HEADS.kv, HEADS.dim, device=device).bfloat16()
    q, fresh = qkv[:, : HEADS.query], KvLayer(qkv[:, HEADS.query :].unflatten(1, (2, HEADS.kv)), NO_QUANT, GRANULE)
    chunks, base, first = [], 0, 2
    for slot, (start, length) in enumerate(spans):
        position = torch.arange(start + length, device=device)
        earlier = torch.randn(start, 2, HEADS.kv, HEADS.dim, device=device).bfloat16()
        seen = torch.cat((earlier, fresh.payload[first : first + length]))
        places = table[slot, position // GRANULE].long() * GRANULE + position % GRANULE
        kv_write(kv, base + position, seen[:, 0], seen[:, 1], places)
        chunks.append(Span(first, length, start, base, slot))
        base, first = base + start + length, first + length
    return q, kv, fresh, chunks


def hide_what_is_not_read(kv: KvLayer, fresh: KvLayer, chunks: list[Span]) -> None:
    """Stored tokens of chunks with nothing before them, and computed ones of all other chunks."""
    assert kv.scales is not None
    for chunk in chunks:
        if chunk.start:
            fresh.payload[chunk.first : chunk.first + chunk.query_len] = torch.nan
        else:
            kv.scales[kv.table[chunk.slot].long()] = torch.nan
    fresh.payload[:2] = torch.nan


SPANS = [(0, 40), (17, 30), (0, 1), (33, 5), (0, 70)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 25])
def test_chunks_with_nothing_before_them_are_attended_to_as_they_were_computed(device, window):
    spans = random.sample(SPANS, len(SPANS))
    q, kv, fresh, chunks = problem(spans, device)
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.125, window)
    out = torch.full_like(q, 7.0)
    if device == "cpu" or window is None:
        hide_what_is_not_read(kv, fresh, chunks)
    before = fresh.payload.clone()
    found = ragged_prefill_attention(q, kv, chunks, 0.125, window, out, fresh=fresh)
    assert found is out
    assert_close(found[2:], expected[2:], torch.bfloat16)
    assert (out[:2] == 7).all()
    torch.testing.assert_close(fresh.payload, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_of_whole_prompts_needs_nothing_stored(device):
    q, kv, fresh, chunks = problem([(0, 40), (0, 9)], device)
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.125)
    hide_what_is_not_read(kv, fresh, chunks)
    assert_close(ragged_prefill_attention(q, kv, chunks, 0.125, fresh=fresh)[2:], expected[2:], torch.bfloat16)


def test_what_is_behind_a_chunk_is_another_ones(monkeypatch):
    """Where an operator would clear the rows behind a chunk, what is stored is read."""
    monkeypatch.setattr(module, "takes_kernels", lambda q, kv: kv.format is NO_QUANT)
    monkeypatch.setattr(module, "one_pass_takes", lambda *given: False)
    q, kv, fresh, chunks = problem([(0, 40), (0, 9)], "cpu")
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.125)
    fresh.payload.fill_(torch.nan)
    assert_close(ragged_prefill_attention(q, kv, chunks, 0.125, fresh=fresh)[2:], expected[2:], torch.bfloat16)


def listed(chunks: list[Span], shape: ListShape, device: str) -> tuple[ListViews, bool]:
    """The list of a step, written over whatever the step before left, and whether attention in one pass is enough."""
    numbers = np.full(shape.numbers, 2**40)
    assert fill_list(chunks, None, shape, numbers)
    return list_views(torch.from_numpy(numbers).to(device), shape), one_pass_alone(numbers, shape)


def step(q: torch.Tensor, tokens: int) -> torch.Tensor:
    """Queries of a step of so many tokens."""
    return torch.cat((q, q.new_full((tokens - len(q), *q.shape[1:]), torch.nan)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taken", ["all", "some", "none"])
@pytest.mark.parametrize("seen_rows", [0, 60, 8192])
def test_lists_of_chunks_behind_others_read_numbers_made_of_codes(device, taken, seen_rows, monkeypatch):
    """Those that have no room there read codes; nothing fresh is read."""
    monkeypatch.setattr(listed_scratch, "SEEN_ROWS", seen_rows)
    monkeypatch.setattr(listed_module, "one_pass_routes", routes_of(taken))
    q, kv, fresh, chunks = problem(random.sample(SPANS, len(SPANS)), device)
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.125)
    lists, alone = listed(chunks, list_shape(256, 5, HEADS, q.dtype, 40, False, True), device)
    assert not alone
    fresh.payload.fill_(torch.nan)
    rows = torch.full_like(step(q, 256), 7.0)
    listed_prefill_attention(step(q, 256), kv, lists, 0.125, None, rows, fresh)
    assert_close(rows[2 : len(q)], expected[2:], torch.bfloat16)
    assert (rows[len(q) :] == 7).all()
    passed = {entry[0] for entry in lists.programs.tolist() if entry[1]}
    assert bool(passed) == (taken != "none")
    if seen_rows == 0:
        assert not passed & {chunk.first for chunk in chunks if chunk.start}


@pytest.mark.parametrize("device", DEVICES)
def test_a_list_of_whole_prompts_reads_what_was_computed(device, monkeypatch):
    """Or numbers made of codes, where the step has the graph of both kinds."""
    monkeypatch.setattr(listed_module, "one_pass_routes", routes_of("all"))
    q, kv, fresh, chunks = problem([(0, 40), (0, 9), (0, 70)], device)
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.125)
    lists, alone = listed(chunks, list_shape(256, 3, HEADS, q.dtype, 40, False, True), device)
    assert alone
    for views in (lists, lists._replace(tiles=None, blocks=None)):
        if views.blocks is None:
            hide_what_is_not_read(kv, fresh, chunks)
        rows = torch.full_like(step(q, 256), 7.0)
        listed_prefill_attention(step(q, 256), kv, views, 0.125, None, rows, fresh)
        assert_close(rows[2 : len(q)], expected[2:], torch.bfloat16)


def routes_of(taken: str) -> Callable[[tuple[Span, ...], Heads], tuple[Routes, ...]]:
    """Chunks that attention in one pass is to take."""

    def routes(spans: tuple[Span, ...], heads: Heads) -> tuple[Routes, ...]:
        count = {"all": len(spans), "some": 3, "none": 0}[taken]
        return (Routes(one_pass=spans[:count], stored=spans[count:]),)

    return routes


@pytest.mark.parametrize("tokens", [256, 2048])
def test_chunks_have_rows_of_their_own_and_blocks_for_each(tokens):
    for _ in range(30):
        spans, first = [], random.randint(0, 20)
        while first < tokens and len(spans) < 90:
            length = min(tokens - first, random.choice([1, 33, random.randint(1, 700)]))
            start = random.choice([0, 0, random.randint(1, 3000)])
            spans.append(Span(first, length, start, random.randint(0, 10**9), len(spans)))
            first += length
        placed = place_chunks(spans, tokens)
        rows = torch.zeros(tokens + SEEN_ROWS, dtype=torch.int64)
        for base_row, slot, begin, end, row in placed.blocks.tolist():
            assert 0 < end - begin <= BLOCK_TOKENS
            [chunk] = [each for each in placed.chunks if each.slot == slot]
            assert (base_row, row - begin) == (spans[slot].base_row, chunk.base_row)
            rows[row : row + end - begin] += 1
        assert rows.max() <= 1
        assert rows.sum() == sum(chunk.start + chunk.query_len for chunk in placed.chunks)
        assert all((chunk.base_row == chunk.first) == (chunk.start == 0) for chunk in placed.chunks)
        assert sorted([*(each.slot for each in placed.chunks), *(each.slot for each in placed.others)]) == [
            span.slot for span in spans
        ]
        assert len(placed.blocks) <= most_blocks(tokens)


def test_a_list_of_chunks_behind_long_prefixes_has_room_for_them():
    shape = list_shape(1024, 8, Heads(32, 8, 128, quantized=True), torch.bfloat16, 132, False, True)
    spans = [Span(128 * each, 128, 896, 9, each) for each in range(8)]
    assert fill_list(spans, None, shape, np.empty(shape.numbers, np.int64))
    assert fill_list([Span(0, 128, 60_000, 9, 0)], None, shape, np.empty(shape.numbers, np.int64))


def test_only_bfloat16_is_stored_as_it_is():
    kv = KvLayer(torch.zeros(4, 2, 1, 12, dtype=torch.uint8), FORMAT, 4)
    assert attends_fresh(kv, torch.bfloat16)
    assert not attends_fresh(kv, torch.float16)
    assert not attends_fresh(kv, torch.float32)
    assert not attends_fresh(KvLayer(torch.zeros(4, 2, 1, 8).bfloat16(), NO_QUANT, 4), torch.bfloat16)
