"""Packing of codes into words, against bit arithmetic on Python's integers and the compressed-tensors library."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.quantization.packing import pack, pack_awq, unpack, unpack_awq, words
from tests.quantization.reference import AWQ_SLOTS, bits_of

SIZES = st.tuples(st.integers(1, 37), st.integers(1, 37), st.sampled_from((4, 8)), st.sampled_from((0, 1)))


def random_codes(rows: int, columns: int, bits: int, device: str = "cpu") -> torch.Tensor:
    return torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, device=device)


@settings(deadline=None)
@given(SIZES)
def test_words_hold_the_codes_lowest_bits_first(size: tuple[int, int, int, int]) -> None:
    rows, columns, bits, dim = size
    codes = random_codes(rows, columns, bits)
    packed = pack(codes, bits, dim)
    assert packed.dtype == torch.int32
    assert packed.is_contiguous()
    assert packed.shape[dim] == words(codes.shape[dim], bits) == -(-codes.shape[dim] // (32 // bits))
    table, per_word = packed.tolist(), 32 // bits
    for row in range(rows):
        for column in range(columns):
            at = (row // per_word, column) if dim == 0 else (row, column // per_word)
            slot = (row, column)[dim] % per_word
            assert bits_of(table[at[0]][at[1]], slot, bits) == codes[row, column]


@settings(deadline=None)
@given(SIZES)
def test_unpacking_gives_the_codes_back(size: tuple[int, int, int, int]) -> None:
    rows, columns, bits, dim = size
    codes = random_codes(rows, columns, bits)
    assert torch.equal(unpack(pack(codes, bits, dim), bits, dim, codes.shape[dim]), codes)


@settings(deadline=None)
@given(SIZES)
def test_words_are_those_of_compressed_tensors(size: tuple[int, int, int, int]) -> None:
    rows, columns, bits, dim = size
    codes = random_codes(rows, columns, bits)
    signed = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    theirs = pack_to_int32(signed, bits, packed_dim=dim)  # type: ignore[arg-type]
    assert torch.equal(pack(codes, bits, dim), theirs)
    back = unpack_from_int32(pack(codes, bits, dim), bits, codes.shape, packed_dim=dim)  # type: ignore[arg-type]
    assert torch.equal(back, signed)


@pytest.mark.parametrize("bits", [4, 8])
def test_views_that_are_not_contiguous(bits: int, device: str) -> None:
    codes = random_codes(50, 46, bits, device)[1:50:3, 2:42]
    per_word = 32 // bits
    assert not codes.is_contiguous()
    assert torch.equal(unpack(pack(codes, bits, 1), bits, 1, 40), codes)
    packed = pack(codes, bits, 1)
    for step in (2, 3, 5, 10):
        words_left = packed[:, ::step]
        expected = codes.reshape(len(codes), -1, per_word)[:, ::step].flatten(1)
        assert torch.equal(unpack(words_left, bits, 1, expected.shape[1]), expected)
    for column in (codes[:, 3:4], codes[4:5], codes[:, ::39][:, :1].t()):
        for dim in (0, 1):
            assert torch.equal(unpack(pack(column, bits, dim), bits, dim, column.shape[dim]), column)


@pytest.mark.parametrize("columns", [8, 40])
def test_awq_keeps_its_own_order_of_columns(columns: int, device: str) -> None:
    codes = random_codes(7, columns, 4, device)
    packed = pack_awq(codes)
    expected = np.empty((7, columns), dtype=np.uint8)
    for row, line in enumerate(packed.tolist()):
        for word, value in enumerate(line):
            for slot, column in AWQ_SLOTS.items():
                expected[row, 8 * word + column] = bits_of(value, slot, 4)
    assert torch.equal(codes.cpu(), torch.from_numpy(expected))
    assert torch.equal(unpack_awq(packed), codes)


def test_other_widths_are_refused() -> None:
    codes = random_codes(4, 8, 4)
    with pytest.raises(ValueError, match="4 and 8 bits"):
        pack(codes, 3, 1)
    with pytest.raises(ValueError, match="4 and 8 bits"):
        unpack(codes.view(torch.int32), 2, 1, 8)
