"""Ragged decode attention against its float32 reference, on memory whose other rows are NaN."""

import pytest
import torch
from bladellm_kernels import ragged_decode_attention as decode_module
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference

from tests.kernels.conditions import DEVICES, DTYPES, assert_close, kv_rows

HEADS = [(1, 1, 8), (6, 2, 32), (5, 5, 18), (8, 1, 64)]
LENGTHS = [1, 2, 33, 7, 64, 65, 5]
LIMIT = 150


def decode_case(heads, kv_heads, head_dim, dtype, device, lens=LENGTHS, strided=True):
    """Random queries; each sequence's rows are random, all other rows NaN."""
    layer = kv_rows(len(lens) * LIMIT, kv_heads, head_dim, dtype, device, strided)
    bases = (torch.randperm(len(lens)) * LIMIT + 3).tolist()
    for base, length in zip(bases, lens, strict=True):
        layer[base : base + length] = torch.randn(length, 2, kv_heads, head_dim, device=device).to(dtype)
    q = torch.randn(len(lens), heads + 2 * kv_heads, head_dim, device=device).to(dtype)[:, :heads]
    return q, layer, torch.tensor(bases, device=device), torch.tensor(lens, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 6, 200])
@pytest.mark.parametrize("in_place", [True, False])
def test_decode(device, dtype, heads, window, in_place, monkeypatch):
    monkeypatch.setattr(decode_module, "IN_PLACE_ELEMENTS", 0 if in_place else 2**40)
    q, layer, bases, lens = decode_case(*heads, dtype, device)
    scale = heads[2] ** -0.5
    expected = ragged_decode_attention_reference(q, layer, bases, lens, scale, window)
    for max_kv_len in (65, 71):
        actual = ragged_decode_attention(q, layer, bases, lens, max_kv_len, scale, window)
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [1, 65 * 2 * 2 * 32 * 3])
def test_decode_in_blocks_of_rows_is_the_same(device, elements, monkeypatch):
    monkeypatch.setattr(decode_module, "IN_PLACE_ELEMENTS", 2**40)
    monkeypatch.setattr(decode_module, "GATHER_ELEMENTS", elements)
    q, layer, bases, lens = decode_case(6, 2, 32, torch.float32, device)
    expected = ragged_decode_attention_reference(q, layer, bases, lens, 0.2)
    assert_close(ragged_decode_attention(q, layer, bases, lens, 65, 0.2), expected, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_place", [True, False])
def test_decode_of_a_row_does_not_depend_on_the_others(device, in_place, monkeypatch):
    q, layer, bases, lens = decode_case(6, 2, 32, torch.float32, device)
    monkeypatch.setattr(decode_module, "IN_PLACE_ELEMENTS", 0 if in_place else 2**40)
    together = ragged_decode_attention(q, layer, bases, lens, 65, 0.2)
    for row in range(len(lens)):
        one = slice(row, row + 1)
        alone = ragged_decode_attention(q[one], layer, bases[one], lens[one], int(lens[row]), 0.2)
        torch.testing.assert_close(alone, together[one], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_decode_writes_to_out(device):
    q, layer, bases, lens = decode_case(6, 2, 32, torch.float32, device)
    out = torch.full((len(lens) + 2, 6, 32), 7.0, device=device)
    ragged_decode_attention(q, layer, bases, lens, 65, 0.2, out=out[1:-1])
    assert_close(out[1:-1], ragged_decode_attention_reference(q, layer, bases, lens, 0.2), torch.float32)
    assert (out[0] == 7).all()
    assert (out[-1] == 7).all()


@pytest.mark.gpu
@pytest.mark.skipif("cuda" not in DEVICES, reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 6])
def test_attention_never_waits_for_the_device(window):
    decode = decode_case(6, 2, 32, torch.bfloat16, "cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        ragged_decode_attention(*decode, 65, 0.2, window)
    finally:
        torch.cuda.set_sync_debug_mode("default")
