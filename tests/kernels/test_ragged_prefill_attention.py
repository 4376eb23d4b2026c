"""Ragged prefill attention against its float32 reference, on memory whose other rows are NaN."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bladellm_kernels import ragged_prefill_attention as module
from bladellm_kernels.kv_format import KV_FORMATS
from bladellm_kernels.prefill_tiles import Span
from bladellm_kernels.ragged_prefill_attention import (
    cudnn_takes,
    ragged_prefill_attention,
    ragged_prefill_attention_reference,
)

from tests.kernels.conditions import DEVICES, DTYPES, assert_close
from tests.kernels.prefill_support import SPANS, prefill_case
from tests.support.cases import some_pairs

HEADS = [(1, 1, 8), (6, 2, 32), (5, 5, 18), (8, 1, 64), (7, 1, 96)]
QUANTIZED = [name for name in KV_FORMATS if name != "no_quant"]


def check(case, dtype, window=None):
    """The operator against the reference, in an output that is 7 where nothing may be written."""
    q, kv, chunks = case
    scale = kv.head_dim**-0.5
    out = torch.full(q.shape, 7.0, dtype=dtype, device=q.device)
    ragged_prefill_attention(q, kv, chunks, scale, window, out=out)
    assert (out[:2] == 7).all()
    expected = ragged_prefill_attention_reference(q, kv, chunks, scale, window)
    assert_close(out[2:], expected[2:], dtype)


@pytest.mark.turns
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "window"), some_pairs(HEADS, [None, 1, 6, 23, 200]), ids=str)
def test_prefill(device, dtype, heads, window):
    check(prefill_case("no_quant", dtype, heads, SPANS, device), dtype, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "dtype"), some_pairs(QUANTIZED, DTYPES), ids=str)
@pytest.mark.parametrize(("paged", "mapped", "window"), [(False, True, None), (True, False, 9)])
def test_quantized_prefill(device, dtype, name, paged, mapped, window):
    check(prefill_case(name, dtype, (6, 2, 32), SPANS, device, paged, mapped), dtype, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize(("paged", "mapped"), [(True, False), (True, True), (False, True)])
def test_prefill_of_paged_and_mapped_memory(device, window, paged, mapped):
    check(prefill_case("no_quant", torch.float32, (6, 2, 40), SPANS, device, paged, mapped), torch.float32, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1, 127, 128, 129, 257])
@pytest.mark.parametrize("start", [0, 1, 127, 128, 129, 1031])
def test_lengths_around_tiles(device, start, length):
    check(prefill_case("no_quant", torch.float32, (2, 1, 16), [(start, length), (0, 2)], device), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("elements", [1, 150])
def test_prefill_in_blocks_of_queries_is_the_same(device, window, elements, monkeypatch):
    monkeypatch.setattr(module, "MASK_ELEMENTS", elements)
    check(prefill_case("no_quant", torch.float32, (6, 2, 18), SPANS, device), torch.float32, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["no_quant", "int4_affine"])
@pytest.mark.parametrize("window", [None, 17])
def test_chunks_of_a_sequence_are_the_sequence(device, name, window):
    q, kv, [whole] = prefill_case(name, torch.float32, (6, 2, 32), [(0, 201)], device)
    expected = ragged_prefill_attention(q, kv, [whole], 0.2, window)[2:]
    cuts = [0, 1, 65, 128, 130, 201]
    chunks = [Span(2 + a, b - a, a, whole.base_row, 0) for a, b in pairwise(cuts)]
    actual = ragged_prefill_attention(q, kv, chunks[::-1], 0.2, window)[2:]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_strided_output_and_no_chunk(device):
    q, kv, chunks = prefill_case("no_quant", torch.float32, (6, 2, 32), SPANS, device)
    wide = torch.full((q.shape[0], 12, 32), 7.0, device=device)
    result = ragged_prefill_attention(q, kv, chunks, 0.2, out=wide[:, ::2])
    assert result.data_ptr() == wide.data_ptr()
    assert_close(wide[2:, ::2], ragged_prefill_attention_reference(q, kv, chunks, 0.2)[2:], torch.float32)
    assert (wide[:, 1::2] == 7).all()
    assert ragged_prefill_attention(q, kv, [], 0.2).shape == q.shape


def test_wrong_arguments_are_refused():
    q, kv, chunks = prefill_case("int8", torch.float32, (6, 2, 32), SPANS)
    plain = prefill_case("no_quant", torch.float32, (6, 2, 32), SPANS)[1]
    for bad in (
        (q[:, :5], kv, chunks, 0.2),
        (q[:, :, :16], kv, chunks, 0.2),
        (q[0], kv, chunks, 0.2),
        (q.half(), plain, chunks, 0.2),
        (q, replace(kv, scales=None), chunks, 0.2),
        (q, replace(kv, table=None), chunks, 0.2),
        (q, replace(plain, paged=True), chunks, 0.2),
        (q, kv, chunks, 0.0),
        (q, kv, chunks, 0.2, 0),
        (q, kv, chunks, 0.2, None, torch.empty(3, 6, 32)),
        (q, kv, chunks, 0.2, None, torch.empty(q.shape, dtype=torch.float16)),
        (q, kv, chunks, 0.2, None, torch.empty(*q.shape, 2)[..., 0]),
    ):
        with pytest.raises(ValueError, match=r"fit|queries|scales|table|positive|out must"):
            ragged_prefill_attention(*bad)


def test_cudnn_is_for_half_precision_without_windows():
    hopper, bf16 = (9, 0), torch.bfloat16
    assert cudnn_takes(128, bf16, None, 8192, hopper)
    assert cudnn_takes(128, torch.float16, 200000, 133120, (10, 0))
    assert cudnn_takes(64, bf16, 8192, 8192, hopper)
    for other in (
        (128, torch.float32, None, 8192, hopper),
        (128, bf16, 8191, 8192, hopper),
        (256, bf16, None, 8192, hopper),
        (128, bf16, None, 8192, (8, 0)),
    ):
        assert not cudnn_takes(*other)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", ["no_quant", "int8"])
def test_prefill_never_waits_for_the_device(window, name):
    q, kv, chunks = prefill_case(name, torch.bfloat16, (6, 2, 32), [*SPANS, (1030, 1030)], "cuda")
    ragged_prefill_attention(q, kv, chunks, 0.2, window)
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged_prefill_attention(q, kv, chunks, 0.2, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
