"""RaggedAttention, prefill, against its float32 reference, on memory whose other rows are NaN."""

import pytest
import torch
from bladellm_kernels import ragged_prefill_attention as prefill_module
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention
from bladellm_kernels.ragged_prefill_attention import ragged_prefill_attention, ragged_prefill_attention_reference

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE, Chunk, assert_close, kv_rows

HEADS = [(1, 1, 8), (6, 2, 32), (5, 5, 18), (8, 1, 64)]
LIMIT = 150


def prefill_case(heads, kv_heads, head_dim, dtype, device, spans):
    """Chunks of (start, length) in a flat batch that begins with two tokens of no chunk."""
    layer = kv_rows(len(spans) * LIMIT, kv_heads, head_dim, dtype, device, strided=True)
    chunks, first = [], 2
    for index, (start, length) in enumerate(spans):
        base, total = index * LIMIT + 5, start + length
        layer[base : base + total] = torch.randn(total, 2, kv_heads, head_dim, device=device).to(dtype)
        chunks.append(Chunk(first, length, start, base))
        first += length
    q = torch.randn(first, heads + 2 * kv_heads, head_dim, device=device).to(dtype)[:, :heads]
    return q, layer, chunks


SPANS = [(0, 1), (0, 23), (13, 7), (40, 1), (3, 37), (0, 65), (5, 131)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 6, 23, 200])
def test_prefill(device, dtype, heads, window):
    q, layer, chunks = prefill_case(*heads, dtype, device, SPANS)
    scale = heads[2] ** -0.5
    out = torch.zeros_like(q)
    ragged_prefill_attention(q, layer, chunks, scale, window, out=out)
    assert_close(out, ragged_prefill_attention_reference(q, layer, chunks, scale, window), dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("elements", [1, 150])
def test_prefill_in_blocks_of_queries_is_the_same(device, window, elements, monkeypatch):
    monkeypatch.setattr(prefill_module, "MASK_ELEMENTS", elements)
    q, layer, chunks = prefill_case(6, 2, 32, torch.float32, device, SPANS)
    out = torch.zeros_like(q)
    ragged_prefill_attention(q, layer, chunks, 0.2, window, out=out)
    assert_close(out, ragged_prefill_attention_reference(q, layer, chunks, 0.2, window), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 9])
def test_prefill_of_one_token_is_decode(device, dtype, window):
    """The last token of a chunk, taken as a decode row, gives the same."""
    q, layer, chunks = prefill_case(6, 2, 32, dtype, device, SPANS)
    prefilled = ragged_prefill_attention(q, layer, chunks, 0.2, window)
    last = torch.tensor([chunk.first + chunk.query_len - 1 for chunk in chunks], device=device)
    bases = torch.tensor([chunk.base_row for chunk in chunks], device=device)
    lens = torch.tensor([chunk.start + chunk.query_len for chunk in chunks], device=device)
    kv = KvLayer(layer, NO_QUANT, 1)
    decoded = ragged_decode_attention(q[last], kv, bases, bases, lens, int(lens.max()), 0.2, window)
    torch.testing.assert_close(decoded, prefilled[last], atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 6])
def test_attention_never_waits_for_the_device(window):
    q, layer, chunks = prefill_case(6, 2, 32, torch.bfloat16, "cuda", SPANS)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged_prefill_attention(q, layer, chunks, 0.2, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
