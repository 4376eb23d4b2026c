"""Prefill attention by work lists of fixed length: room, empty entries, and every way to carry a list out."""

import random

import numpy as np
import pytest
import torch
from bladellm_kernels import prefill_tiles
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.listed_prefill_attention import (
    ListShape,
    fill_list,
    list_shape,
    list_views,
    listed_cost,
    listed_prefill_attention,
    one_pass_programs,
)
from bladellm_kernels.prefill_costs import Heads
from bladellm_kernels.prefill_tiles import Span, TileShape
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention_reference

from tests.kernels.conditions import DEVICES, assert_close
from tests.kernels.interpreted import run_interpreted
from tests.kernels.prefill_support import SPANS, prefill_case

POISON = 2**40


def listed(spans, window, shape: ListShape, device="cpu"):
    """The list of a step, written over whatever the step before left."""
    numbers = np.full(shape.numbers, POISON)
    assert fill_list(spans, window, shape, numbers)
    return list_views(torch.from_numpy(numbers).to(device), shape)


def shape_for(q, kv, chunks: int) -> ListShape:
    heads = Heads(q.shape[1], kv.kv_heads, kv.head_dim, quantized=kv.format.quantized)
    return list_shape(q.shape[0], chunks, heads, q.dtype, one_pass_programs(q.shape[0], kv, q.dtype))


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 6, 200])
@pytest.mark.parametrize("heads", [(6, 2, 32), (5, 5, 16), (7, 1, 96)], ids=str)
@pytest.mark.parametrize("part", [1024, 16])
def test_lists_give_the_reference(device, window, heads, part, monkeypatch):
    """Chunks one by one and together; with short parts most of them are divided. Other rows keep what they have."""
    monkeypatch.setattr(prefill_tiles, "PART_KEYS", part)
    q, kv, chunks = prefill_case("no_quant", torch.float32, heads, SPANS, device)
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.2, window)
    for spans in [chunks] if part == 1024 else [[chunk] for chunk in chunks]:
        out = torch.full(q.shape, 7.0, device=device)
        shape = shape_for(q, kv, len(chunks))
        listed_prefill_attention(q, kv, listed(spans, window, shape, device), 0.2, window, out)
        inside = torch.zeros(len(q), dtype=torch.bool)
        for span in spans:
            inside[span.first : span.first + span.query_len] = True
        assert_close(out[inside], expected[inside], torch.float32)
        assert (out[~inside] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "paged"), [*((name, False) for name in KV_FORMATS), ("no_quant", True), ("int4", True)]
)
def test_every_kv_format(device, name, paged):
    q, kv, chunks = prefill_case(name, torch.float16, (6, 2, 32), SPANS, device, paged=paged)
    out = torch.full(q.shape, 7.0, dtype=q.dtype, device=device)
    listed_prefill_attention(q, kv, listed(chunks, 9, shape_for(q, kv, len(chunks)), device), 0.2, 9, out)
    assert_close(out[2:], ragged_prefill_attention_reference(q, kv, chunks, 0.2, 9)[2:], q.dtype)
    assert (out[:2] == 7).all()


@pytest.mark.parametrize("heads", [(32, 8, 128), (28, 4, 128), (8, 1, 64)], ids=str)
@pytest.mark.parametrize(("tokens", "programs"), [(32, 0), (96, 0), (1024, 0), (2048, 0), (256, 132), (2048, 132)])
def test_there_is_room_for_every_step_of_few_chunks(heads, tokens, programs):
    """However the tokens are shared out, wherever chunks start; one chunk's keys may be divided."""
    shape = list_shape(tokens, 4, Heads(*heads), torch.bfloat16, programs)
    target = np.empty(shape.numbers, dtype=np.int64)
    for _ in range(20):
        cuts = np.sort(np.random.randint(1, tokens, 3))
        lengths = np.diff([0, *cuts, tokens])
        spans = [Span(0, int(length), 0, 0, slot) for slot, length in enumerate(lengths) if length]
        spans[0] = spans[0]._replace(start=int(np.random.randint(100_000)))
        assert fill_list(spans, None, shape, target)
    many = [Span(0, 1, 0, 0, slot) for slot in range(shape.items + programs + 1)]
    assert not fill_list(many, None, shape, target)


def test_many_divided_chunks_have_no_room():
    shape = list_shape(256, 4, Heads(32, 8, 128), torch.bfloat16)
    target = np.empty(shape.numbers, dtype=np.int64)
    assert fill_list([Span(0, 16, 60_000, 0, 0)], None, shape, target)
    assert not fill_list([Span(0, 16, 60_000, 0, slot) for slot in range(2)], None, shape, target)


def test_each_chunk_is_in_one_of_the_lists():
    """In one pass or as tiles; windows are Triton's; more chunks than programs have no room."""
    shape = list_shape(1024, 8, Heads(32, 8, 128), torch.bfloat16, 132)
    for _ in range(50):
        lengths = [int(400 ** random.random()) for _ in range(random.randint(0, 6))]
        spans = [Span(7 * slot, each, int(40_000 ** random.random()), 9, slot) for slot, each in enumerate(lengths)]
        views = listed(spans, None, shape)
        passed = {(first, count, start) for first, count, start, _, _, _ in views.programs.tolist() if count}
        tiled = {(item[1], item[2], item[3]) for item in views.tiles.items.tolist() if item[2]}
        assert not passed & tiled
        assert passed | tiled == {(span.first, span.query_len, span.start) for span in spans}
        windowed = list_shape(1024, 8, Heads(32, 8, 128), torch.bfloat16, 132, True)
        assert (listed(spans, 600, windowed).programs[:, 1] == 0).all()
    narrow = listed([Span(0, 16, 60_000, 0, 0), Span(16, 600, 0, 0, 1)], None, shape)
    assert set(narrow.programs[:, 1].tolist()) == {600}, "few queries behind many keys have their keys divided"
    many = [Span(slot, 4, 0, 0, slot) for slot in range(140)]
    assert not fill_list(many, None, shape._replace(items=1), np.empty(shape.numbers, np.int64))


def test_cost_grows_with_the_prefix():
    heads = Heads(32, 8, 128)
    costs = [listed_cost([Span(0, 1024, start, 0, 0)], heads) for start in (0, 4096, 32768)]
    assert costs == sorted(costs)
    assert listed_cost([], heads) < costs[0]


def interpreted() -> None:
    """The Triton kernels on lists with room to spare."""
    from bladellm_kernels.ragged_prefill_triton import launch_tiles

    for part, window, name in [(1024, None, "no_quant"), (16, None, "no_quant"), (16, 9, "int8")]:
        prefill_tiles.PART_KEYS = part
        q, kv, chunks = prefill_case(name, torch.float32, (6, 2, 32), [(0, 5), (40, 1), (13, 30)])
        shape = ListShape(16, 3, 2, 40, 20, 30)
        out = torch.full(q.shape, 7.0)
        tiles = listed(chunks, window, shape).tiles
        launch_tiles(q, kv, tiles, TileShape(16, 16, 4, 1), 0.21, window, out, True)
        assert (out[:2] == 7).all()
        assert_close(out[2:], ragged_prefill_attention_reference(q, kv, chunks, 0.21, window)[2:], torch.float32)


def test_the_kernels_interpreted_give_the_same():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_listed_prefill_attention", "interpreted")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["no_quant", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("heads", [(32, 8, 128), (4, 4, 64)], ids=str)
def test_a_captured_launch_serves_every_list(name, heads):
    spans = [(0, 1), (0, 300), (513, 200), (7000, 65), (3, 40), (64, 130)]
    q, kv, chunks = prefill_case(name, torch.bfloat16, heads, spans, "cuda")
    shape = shape_for(q, kv, len(spans))
    numbers, out = torch.zeros(shape.numbers, dtype=torch.int64, device="cuda"), torch.empty_like(q)
    lists, graph = list_views(numbers, shape), torch.cuda.CUDAGraph()
    listed_prefill_attention(q, kv, lists, 0.1, None, out)
    with torch.cuda.graph(graph):
        listed_prefill_attention(q, kv, lists, 0.1, None, out)
    expected = ragged_prefill_attention_reference(q.cpu(), on_cpu(kv), chunks, 0.1)
    for some in ([], chunks[:1], chunks[3:4], chunks[1:3], chunks):
        numbers.copy_(torch.from_numpy(filled(some, shape)))
        out.fill_(7)
        graph.replay()
        found = out.cpu()
        inside = torch.zeros(len(q), dtype=torch.bool)
        for span in some:
            inside[span.first : span.first + span.query_len] = True
        assert (found[~inside] == 7).all()
        assert_close(found[inside], expected[inside], torch.bfloat16)


def filled(spans, shape: ListShape) -> np.ndarray:
    numbers = np.full(shape.numbers, POISON)
    assert fill_list(spans, None, shape, numbers)
    return numbers


def on_cpu(kv):
    table, scales = (None if each is None else each.cpu() for each in (kv.table, kv.scales))
    return type(kv)(kv.payload.cpu(), kv.format, kv.granule_tokens, table, scales, kv.paged)
