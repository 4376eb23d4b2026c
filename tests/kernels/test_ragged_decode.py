"""Decode attention against its float32 reference, on memory whose other rows, scales and granules are poison."""

from dataclasses import replace

import pytest
import torch
from bladellm_kernels import ragged_decode_attention as module
from bladellm_kernels.decode_schedule import DecodeSchedule
from bladellm_kernels.kv_format import KV_FORMATS, NO_QUANT
from bladellm_kernels.ragged_decode_attention import ragged_decode_attention, ragged_decode_attention_reference

from tests.kernels.conditions import DEVICES, DTYPES, TOLERANCE, assert_close
from tests.kernels.decode_support import FORMATS, decode_case
from tests.support.cases import some_pairs

HEADS = [(1, 1, 8), (6, 2, 32), (5, 5, 40), (8, 1, 64)]
BATCHES = [(None, 1, False, 16), (6, 1, True, 5), (None, 3, True, 64), (9, 5, False, 128), (70, 2, False, 256)]
"""Window, queries a sequence, whether memory is paged, and tokens of a granule."""
LENGTHS = [1, 2, 33, 7, 64, 65, 5, 63]


def check(case, window, **options):
    arguments = (case.scale, window, case.query_len)
    actual = ragged_decode_attention(*case.memory, case.longest, *arguments, **options)
    assert actual.dtype == case.q.dtype
    expected = ragged_decode_attention_reference(*case.memory, *arguments)
    assert_close(actual, expected, case.q.dtype)
    return actual


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "window"), some_pairs([*HEADS, (5, 5, 18)], [None, 1, 6, 200]), ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_unquantized(device, dtype, heads, window, in_place, monkeypatch):
    monkeypatch.setattr(module, "IN_PLACE_ELEMENTS", 0 if in_place else 2**40)
    case = decode_case("no_quant", dtype, heads, LENGTHS, device, window=window)
    check(case, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("format_name", "dtype"), some_pairs(FORMATS, DTYPES), ids=str)
@pytest.mark.parametrize(("heads", "batch"), some_pairs(HEADS, BATCHES), ids=str)
def test_every_format(device, dtype, format_name, heads, batch):
    window, query_len, paged, granule_tokens = batch
    lens = [length for length in (1, 2, 33, 0, 64, 65, 5, 131) if length == 0 or length >= query_len]
    case = decode_case(format_name, dtype, heads, lens, device, granule_tokens, paged, query_len, window)
    check(case, window)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("elements", [1, 65 * 2 * 2 * 32 * 3])
def test_blocks_of_rows_are_the_same(device, elements, monkeypatch):
    monkeypatch.setattr(module, "IN_PLACE_ELEMENTS", 2**40)
    monkeypatch.setattr(module, "GATHER_ELEMENTS", elements)
    check(decode_case("no_quant", torch.float32, (6, 2, 32), LENGTHS, device), None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", ["no_quant", "int4"])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_sequence_does_not_depend_on_the_others(device, format_name, in_place, monkeypatch):
    monkeypatch.setattr(module, "IN_PLACE_ELEMENTS", 0 if in_place else 2**40)
    case = decode_case(format_name, torch.float32, (6, 2, 32), LENGTHS, device)
    together = check(case, None)
    for row in range(len(LENGTHS)):
        one = slice(row, row + 1)
        memory = (case.q[one], case.kv, case.base_rows[one], case.slots[one], case.kv_lens[one])
        alone = ragged_decode_attention(*memory, int(case.kv_lens[row]), case.scale)
        torch.testing.assert_close(alone, together[one], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format_name", ["no_quant", "int8_affine"])
@pytest.mark.parametrize("lens", [[0, 0], [0, 9, 0, 70, 0]])
def test_sequences_of_length_zero_are_not_read(device, format_name, lens):
    case = decode_case(format_name, torch.float32, (6, 2, 32), lens, device)
    case.base_rows[case.kv_lens == 0] = 2**60
    case.slots[case.kv_lens == 0] = 2**60
    out = check(case, None, out=torch.full_like(case.q, torch.nan))
    assert (out[case.kv_lens == 0] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("query_len", [1, 4])
def test_the_queries_of_a_sequence_are_as_if_asked_one_after_the_other(device, query_len):
    case = decode_case("int8", torch.float32, (6, 2, 32), [4, 30, 99], device, query_len=query_len)
    together, bounds = check(case, 20), {"atol": 1e-6, "rtol": 1e-5}
    if device == "cpu":
        # Sums of float32 in another order differ by 1.7e-6 at times, values being 3.
        case, bounds = replace(case, q=case.q.double()), {"atol": 1e-12, "rtol": 1e-12}
        together = ragged_decode_attention(*case.memory, case.longest, case.scale, 20, query_len)
    for query in range(query_len):
        lens = case.kv_lens - query_len + query + 1
        memory = (case.q[query::query_len], case.kv, case.base_rows, case.slots, lens)
        alone = ragged_decode_attention(*memory, case.longest, case.scale, 20)
        torch.testing.assert_close(alone, together[query::query_len], **bounds)


@pytest.mark.parametrize("device", DEVICES)
def test_it_writes_to_out_and_nowhere_else(device):
    case = decode_case("no_quant", torch.float32, (6, 2, 32), LENGTHS, device)
    out = torch.full((len(LENGTHS) + 2, 7, 48), 7.0, device=device)
    check(case, None, out=out[1:-1, :6, :32])
    expected = ragged_decode_attention_reference(*case.memory, case.scale)
    assert_close(out[1:-1, :6, :32], expected, torch.float32)
    out[1:-1, :6, :32] = 7
    assert (out == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_no_sequences(device):
    case = decode_case("no_quant", torch.float32, (6, 2, 32), [3], device)
    empty = (case.q[:0], case.kv, case.base_rows[:0], case.slots[:0], case.kv_lens[:0])
    assert ragged_decode_attention(*empty, 1, 0.2).shape == (0, 6, 32)


def test_wrong_arguments_are_refused():
    case = decode_case("int8", torch.float32, (6, 2, 32), [3, 4])
    q, kv, bases, slots, lens = case.memory
    for bad in (
        (q[:1], kv, bases, slots, lens),
        (q[:, :5], kv, bases, slots, lens),
        (q[:, :, :30], kv, bases, slots, lens),
        (q, kv, bases[:1], slots, lens),
        (q, kv, bases, slots[:1], lens),
        (q, kv, bases, slots, lens.int()),
        (q, replace(kv, format=NO_QUANT), bases, slots, lens),
        (q, replace(kv, format=KV_FORMATS["int8_affine"]), bases, slots, lens),
        (q, replace(kv, scales=None), bases, slots, lens),
        (q, replace(kv, table=None), bases, slots, lens),
        (q.transpose(1, 2).contiguous().transpose(1, 2), kv, bases, slots, lens),
    ):
        with pytest.raises(ValueError, match=r"quer|heads|int64|table|contiguous"):
            ragged_decode_attention(*bad, 4, 0.2)
    with pytest.raises(ValueError, match="out must be like q"):
        ragged_decode_attention(*case.memory, 4, 0.2, out=q.half())


def test_the_reference_is_attention():
    """One head, three positions, by hand: weights 1/2, 1/4 and 1/4 under a logarithm of two as the scale."""
    case = decode_case("no_quant", torch.float32, (1, 1, 8), [3])
    rows = case.kv.payload[case.base_rows[0] :][:3]
    rows[:, 0] = 0
    rows[:, 0, 0, 0] = torch.tensor([2.0, 1.0, 1.0])
    case.q[0] = 1
    expected = rows[0, 1, 0] / 2 + rows[1, 1, 0] / 4 + rows[2, 1, 0] / 4
    out = ragged_decode_attention_reference(*case.memory, torch.log(torch.tensor(2.0)).item())
    torch.testing.assert_close(out[0, 0], expected)
    newest = ragged_decode_attention_reference(*case.memory, 1.0, 1)
    assert torch.equal(newest[0, 0], rows[2, 1, 0])
    assert TOLERANCE[torch.float32] < 1e-3


@pytest.mark.parametrize(
    ("block_kv", "warps", "lane_heads"),
    [(64, 8, 1), (96, 4, 1), (64, 3, 1), (8, 1, 1), (32, 4, 3), (32, 4, 8), (8, 4, 4)],
)
def test_schedules_whose_warps_cannot_share_a_block_are_refused(block_kv, warps, lane_heads):
    with pytest.raises(ValueError, match="must share"):
        DecodeSchedule(block_kv, 3, warps, 1, lane_heads=lane_heads)
