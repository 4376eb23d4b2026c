"""Large prefill chunks by a library's attention: their plans and their parts, with a plain stand-in."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from bladellm_kernels import prefill_plan, prefill_sdpa
from bladellm_kernels.kv_dequantize import Stretch, kv_dequantize
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.merge_attention import merge_attention
from bladellm_kernels.prefill_sdpa import State, attend_chunk, cudnn_attention, empty_queries
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention, ragged_prefill_attention_reference

from tests.kernels.conditions import DEVICES, assert_close
from tests.kernels.interpreted import run_interpreted
from tests.kernels.prefill_support import prefill_case
from tests.support.cases import some_pairs

ON_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif("cuda" not in DEVICES or torch.cuda.get_device_capability() < (9, 0), reason="needs a Hopper"),
]


def attention(q, k, v, causal, scale, offset=0) -> State:
    """Written out in float32; with `causal`, query i sees keys up to i + offset."""
    group = q.shape[1] // k.shape[1]
    k, v = (each.float().repeat_interleave(group, 1) for each in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + offset)
        scores = scores.masked_fill(hidden, -math.inf)
    return State(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).to(q.dtype), scores.logsumexp(-1).T)


class StandIn:
    """The library: refuses what it must not be given, and remembers shapes and arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.Tensor, torch.Tensor, bool]] = []

    def __call__(self, q, k, v, causal, scale) -> State:
        assert all(each.isfinite().all() for each in (k, v)), "an operator multiplies what no sequence holds"
        assert not causal or q.shape[0] == k.shape[0]
        self.calls.append((q, k, causal))
        return attention(q, k, v, causal, scale)


@pytest.fixture
def small(monkeypatch):
    """The same in small: steps of 8 positions."""
    monkeypatch.setattr(prefill_plan, "LENGTH_STEP", 8)
    monkeypatch.setattr(prefill_plan, "LONGEST_LEAD", 24)
    monkeypatch.setattr(prefill_sdpa, "LENGTH_STEP", 8)
    monkeypatch.setattr(prefill_sdpa, "LONGEST_LEAD", 24)
    monkeypatch.setattr(prefill_sdpa, "MERGED_AT_ONCE", 3)
    prefill_plan.plan_chunk.cache_clear()
    yield
    prefill_plan.plan_chunk.cache_clear()


MEMORIES = [*product(KV_FORMATS, [False]), ("no_quant", True), ("int4_affine", True)]
"""Formats, and whether memory is paged."""
SPANS = [(0, 1), (0, 24), (0, 29), (16, 8), (17, 40), (31, 1), (100, 61), (112, 64)]


@pytest.mark.turns
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("longest", [16, 64])
@pytest.mark.parametrize(("memory", "heads"), some_pairs(MEMORIES, [(4, 2, 16), (7, 1, 8), (3, 3, 24)]), ids=str)
def test_parts_merge_to_the_reference(memory, heads, longest, monkeypatch):
    name, paged = memory
    monkeypatch.setattr(prefill_sdpa, "LONGEST_PIECE", longest)
    q, kv, chunks = prefill_case(name, torch.float32, heads, SPANS, paged=paged, mapped=heads[1] == 2)
    q[:2] = torch.nan
    expected = ragged_prefill_attention_reference(q, kv, chunks, 0.3)
    out = torch.full(q.shape, 7.0)
    for span in chunks:
        rows = slice(span.first, span.first + span.query_len)
        assert_close(attend_chunk(q, kv, span, 0.3, None, StandIn()), expected[rows], torch.float32)
        assert (out[rows] == 7).all()
        result = attend_chunk(q, kv, span, 0.3, out, StandIn())
        assert result.data_ptr() == out[rows].data_ptr()
    assert_close(out[2:], expected[2:], torch.float32)
    assert (out[:2] == 7).all()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("margin", [False, True])
@pytest.mark.parametrize(("start", "length"), [(0, 24), (48, 16), (16, 13), (43, 17), (0, 33)])
def test_keys_are_read_in_place_and_queries_with_their_neighbours(start, length, margin):
    """A chunk between NaN queries; what pads it behind in its last granule (of 16) becomes zero, and nothing else."""
    case, kv, [span] = prefill_case("no_quant", torch.float32, (4, 2, 16), [(start, length)], mapped=True)
    q = empty_queries((length, 4, 16), torch.float32, "cpu") if margin else torch.empty(length, 4, 16)
    if margin:
        torch.as_strided(q, (24 + length + prefill_sdpa.ROWS_BEHIND, 4, 16), q.stride(), 0).fill_(torch.nan)
    q.copy_(case[2:])
    span = span._replace(first=0)
    kept, library = kv.payload.clone(), StandIn()
    result = attend_chunk(q, kv, span, 0.3, None, library)
    assert_close(result, ragged_prefill_attention_reference(q, kv, [span], 0.3), torch.float32)
    for index, (queries, keys, causal) in enumerate(library.calls):
        assert causal == (index == 0)
        own = queries.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()
        assert own == (margin or (start, length) == (0, 24))
        assert queries.stride() == q.stride(), "another plan"
        assert keys.untyped_storage().data_ptr() == kv.payload.untyped_storage().data_ptr()
    end = span.base_row + start + length
    changed = (kv.payload.nan_to_num(7) != kept.nan_to_num(7)).flatten(1).any(1).nonzero().flatten()
    last = -(-(start + length) // 8) * 8
    assert changed.tolist() == list(range(end, span.base_row + last))
    assert (kv.payload[changed] == 0).all()


@pytest.mark.usefixtures("small")
def test_keys_are_copied_where_the_granule_has_no_room():
    q, kv, [span] = prefill_case("no_quant", torch.float32, (4, 2, 16), [(0, 29)], mapped=True)
    kept, library = kv.payload.clone(), StandIn()
    expected = ragged_prefill_attention_reference(q, kv, [span], 0.3)
    kv = replace(kv, granule_tokens=10)
    assert_close(attend_chunk(q, kv, span, 0.3, None, library), expected[2:], torch.float32)
    assert len(library.calls[0][1]) == 32
    assert torch.equal(kv.payload.nan_to_num(7), kept.nan_to_num(7))


@pytest.mark.usefixtures("small")
def test_the_buffer_is_bounded(monkeypatch):
    q, kv, [span] = prefill_case("int8", torch.float32, (4, 2, 16), [(144, 20)])
    monkeypatch.setattr(prefill_sdpa, "SCRATCH_ELEMENTS", 40 * 2 * 2 * 16)
    merged: list[int] = []
    monkeypatch.setattr(
        prefill_sdpa, "merge_attention", lambda outs, *more: merged.append(len(outs)) or merge_attention(outs, *more)
    )
    library = StandIn()
    attend_chunk(q, kv, span, 0.3, None, library)
    assert max(merged) == 3, "states are kept"
    pieces = [keys.shape[0] for _, keys, causal in library.calls if not causal]
    assert len(pieces) >= 4
    assert max(pieces) == 32


def test_pieces_in_place_keep_within_32_bits():
    def longest(row_elements: int) -> int:
        memory = torch.empty_strided((2, 2, 1, 8), (row_elements, 16, 8, 1), dtype=torch.bfloat16, device="meta")
        return prefill_sdpa.longest_piece(KvLayer(memory, KV_FORMATS["no_quant"], 16))

    assert longest(16384) == 65536
    assert longest(81920) == 16384


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_CUDA)])
@pytest.mark.parametrize("heads", [(8, 2, 128), (5, 5, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "paged"), [*product(KV_FORMATS, [False]), ("no_quant", True)], ids=str)
def test_large_chunks_on_cuda(marked, heads, dtype, name, paged):
    """Against attention written out, on memory that is NaN beside the sequences."""
    spans = [(0, 1024), (0, 1531), (1024, 1024), (5000, 700), (3, 40)]
    q, kv, chunks = prefill_case(name, dtype, heads, spans, "cuda", paged, mapped=heads[1] == 2)
    out, parts = torch.full((2, *q.shape), 7.0, dtype=dtype, device="cuda").unbind(0)
    ragged_prefill_attention(q, kv, chunks, 0.1, out=out)
    for span in chunks:
        attend_chunk(q, kv, span, 0.1, parts, aside=span.slot % 2 == 1)
    assert (out[:2] == 7).all()
    assert (parts[:2] == 7).all()
    for span in chunks:
        rows = slice(span.first, span.first + span.query_len)
        stored = torch.empty(span.start + span.query_len, 2, heads[1], heads[2], device="cuda")
        kv_dequantize(kv, [Stretch(span.base_row, span.slot, 0, len(stored))], stored)
        expected = attention(q[rows].float(), stored[:, 0], stored[:, 1], True, 0.1, span.start).out
        assert_close(out[rows], expected, dtype)
        assert_close(parts[rows], expected, dtype)
    [alone] = [span for span in chunks if span.query_len == 1531]
    queries = q[alone.first : alone.first + 1531]
    result = ragged_prefill_attention(queries, kv, [alone._replace(first=0)], 0.1)
    # Perhaps by another kernel. Both round the weights of a sum, of values up to 3, to `dtype`.
    torch.testing.assert_close(
        result, out[alone.first : alone.first + 1531], atol=torch.finfo(dtype).eps / 2, rtol=1e-2
    )


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_CUDA)])
@pytest.mark.parametrize(("start", "length"), [(0, 1000), (0, 3000), (5000, 1500), (777, 2048), (2048, 2048)])
def test_chunks_are_padded_in_place_on_cuda(marked, start, length):
    """Memory in granules of 512 and queries with rows around them, all NaN where nothing is."""
    total = start + length
    mapped = -(-total // 512) * 512
    memory = torch.full((mapped + 512, 3, 2, 2, 128), torch.nan, dtype=torch.bfloat16, device="cuda")
    payload = memory[:, 1].transpose(1, 2)
    payload[:total] = torch.randn(total, 2, 2, 128, device="cuda").bfloat16()
    q = empty_queries((length, 8, 128), torch.bfloat16, torch.device("cuda"))
    q.as_strided((q.untyped_storage().nbytes() // 2,), (1,), 0).fill_(torch.nan)
    q.normal_()
    stored = payload[:total].float()
    expected = attention(q.float(), stored[:, 0], stored[:, 1], True, 0.1, start).out
    kv = KvLayer(payload, KV_FORMATS["no_quant"], 512)
    result = attend_chunk(q, kv, Span(0, length, start, 0, 0), 0.1)
    assert_close(result, expected, torch.bfloat16)
    assert torch.equal(payload[:total].float(), stored)
    assert payload[mapped:].isnan().all()
    assert memory[:, 0].isnan().all()
    assert memory[:, 2].isnan().all()


@pytest.mark.parametrize("marked", [pytest.param(None, marks=ON_CUDA)])
@pytest.mark.parametrize("causal", [False, True])
def test_the_library_gives_attention_and_its_natural_logarithm(marked, causal):
    q = torch.randn(256, 12, 128, device="cuda", dtype=torch.bfloat16)[:, :8]
    memory = torch.randn(256, 3, 2, 2, 128, device="cuda", dtype=torch.bfloat16)[:, 1].transpose(1, 2)
    torch.backends.cuda.enable_cudnn_sdp(False)
    actual = cudnn_attention(q, memory[:, 0], memory[:, 1], causal, 0.1)
    expected = attention(q.float(), memory[:, 0], memory[:, 1], causal, 0.1)
    assert_close(actual.out, expected.out, torch.bfloat16)
    torch.testing.assert_close(actual.lse, expected.lse, atol=1e-2, rtol=1e-2)


def interpreted() -> None:
    """The kernel of dequantizing, interpreted."""
    from bladellm_kernels.kv_dequantize import Stretch, kv_dequantize_reference
    from bladellm_kernels.kv_dequantize_triton import launch as dequantize

    for (name, paged), (first, end) in product([*product(KV_FORMATS, [False]), ("int4", True)], [(0, 39), (13, 14)]):
        _, kv, [other, span] = prefill_case(name, torch.float32, (3, 3, 24), [(2, 5), (20, 19)], paged=paged)
        stretches = (Stretch(span.base_row, span.slot, first, end), Stretch(other.base_row, other.slot, 1, 7))
        expected = torch.empty(end - first + 6, 2, 3, 24)
        kv_dequantize_reference(kv, stretches, expected)
        target = torch.full((end - first + 8, 2, 6, 24), 7.0)
        dequantize(kv, stretches, target[1:-1, :, ::2])
        torch.testing.assert_close(target[1:-1, :, ::2], expected)
        target[1:-1, :, ::2] = 7
        assert (target == 7).all()


def test_the_kernels_interpreted_give_the_same():
    pytest.importorskip("triton")
    run_interpreted("tests.kernels.test_ragged_prefill_sdpa", "interpreted")
