"""Codes of 4 and 8 bits packed into int32 words, lowest bits first, as GPTQ, AWQ and compressed-tensors store them.

A word holds 32 / bits codes: code j of a word lies in its bits [j · bits, (j + 1) · bits). Codes are uint8, one a byte.
Words are read through their bytes, which assumes a little-endian machine, as PyTorch's supported ones are.
"""

import torch
from torch.nn.functional import pad

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ's order of columns in a word: slot i holds column AWQ_ORDER[i] of the eight."""


def words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes."""
    return -(-count * bits // 32)


def pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words of codes, a uint8 matrix with values below 2^bits, packed along `dim` (0 or 1).

    The last word is filled up with zero codes. The result is contiguous.
    """
    if dim == 0:
        return pack(codes.t(), bits, 1).t().contiguous()
    _check_bits(bits)
    columns = codes.shape[1]
    codes = pad(codes, (0, words(columns, bits) * (32 // bits) - columns))
    if bits == 4:
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    return _flat(codes).view(torch.int32).view(len(codes), -1)


def unpack(packed: torch.Tensor, bits: int, dim: int, count: int) -> torch.Tensor:
    """The first `count` codes along `dim` (0 or 1) of a matrix of int32 words: the inverse of `pack`.

    The result is uint8, and transposed in memory where dim is 0.
    """
    if dim == 0:
        return unpack(packed.t(), bits, 1, count).t()
    _check_bits(bits)
    codes = _flat(packed).view(torch.uint8).view(len(packed), 4 * packed.shape[1])
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    return codes[:, :count]


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """int32 [K, N / 8] of 4-bit codes, uint8 [K, N], the columns of a word in AWQ's order. N is a multiple of 8."""
    slots = codes.reshape(len(codes), -1, 8)[..., list(AWQ_ORDER)]
    return pack(slots.flatten(1), 4, 1)


def unpack_awq(packed: torch.Tensor) -> torch.Tensor:
    """The 4-bit codes, uint8 [K, N], of int32 [K, N / 8]: the inverse of `pack_awq`."""
    slots = unpack(packed, 4, 1, packed.shape[1] * 8).reshape(len(packed), -1, 8)
    return slots[..., [AWQ_ORDER.index(column) for column in range(8)]].flatten(1)


def _flat(matrix: torch.Tensor) -> torch.Tensor:
    """The values one after another: a single row or column counts as contiguous whatever its strides, this does not."""
    return matrix.reshape(-1).contiguous()


def _check_bits(bits: int) -> None:
    if bits not in (4, 8):
        raise ValueError(f"only codes of 4 and 8 bits are packed, got {bits}")
