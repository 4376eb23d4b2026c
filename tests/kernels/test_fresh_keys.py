"""Chunks with nothing before them, attended to on keys and values as they were computed."""

import random

import numpy as np
import pytest
import torch
from bladellm_kernels import ragged_prefill_attention as module
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_write import kv_write
from bladellm_kernels.listed_prefill_attention import fill_list, list_shape, list_views, listed_prefill_attention
from bladellm_kernels.one_pass_gate import attends_fresh
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention, ragged_prefill_attention_reference

from tests.kernels.conditions import DEVICES, assert_close

HEADS = Heads(6, 2, 64, quantized=True)
GRANULE = 16
FORMAT = KV_FORMATS["fp12_e4m7"]


def problem(spans: list[tuple[int, int]], device: str) -> tuple[torch.Tensor, KvLayer, KvLayer, list[Span]]:
    """Queries; memory of 12 bits with all that chunks of (start, length) see; what was computed of their own tokens,
    behind two of no chunk; the chunks."""
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spans", [SPANS, [(0, 40), (0, 9)], [(17, 30)]], ids=str)
def test_lists_name_the_rows_of_the_step(device, spans):
    q, kv, fresh, chunks = problem(random.sample(spans, len(spans)), device)
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.125)
    shape = list_shape(256, len(chunks), HEADS, q.dtype, 40, False, attends_fresh(kv, q.dtype))
    numbers = np.full(shape.numbers, 2**40)
    assert fill_list(chunks, None, shape, numbers)
    lists = list_views(torch.from_numpy(numbers).to(device), shape)
    passed = {tuple(entry[:4]) for entry in lists.programs.tolist() if entry[1]}
    assert passed == {(each.first, each.query_len, 0, each.first) for each in chunks if each.start == 0}
    tiled = {(item[1], item[4]) for item in lists.tiles.items.tolist() if item[2]}
    assert tiled == {(each.first, each.base_row) for each in chunks if each.start}
    hide_what_is_not_read(kv, fresh, chunks)
    # Queries of a step of 256 tokens, as the list is for.
    padded = torch.cat((q, q.new_zeros(256 - len(q), *q.shape[1:])))
    rows = torch.full_like(padded, 7.0)
    listed_prefill_attention(padded, kv, lists, 0.125, None, rows, fresh)
    assert_close(rows[2 : len(q)], expected[2:], torch.bfloat16)
    assert (rows[len(q) :] == 7).all()


def test_a_list_of_chunks_behind_others_has_room_for_them():
    shape = list_shape(1024, 8, Heads(32, 8, 128, quantized=True), torch.bfloat16, 132, False, True)
    spans = [Span(128 * each, 128, 500, 9, each) for each in range(8)]
    assert fill_list(spans, None, shape, np.empty(shape.numbers, np.int64))


def test_only_bfloat16_is_stored_as_it_is():
    kv = KvLayer(torch.zeros(4, 2, 1, 12, dtype=torch.uint8), FORMAT, 4)
    assert attends_fresh(kv, torch.bfloat16)
    assert not attends_fresh(kv, torch.float16)
    assert not attends_fresh(kv, torch.float32)
    assert not attends_fresh(KvLayer(torch.zeros(4, 2, 1, 8).bfloat16(), NO_QUANT, 4), torch.bfloat16)
