"""Slow readings of the checkpoint formats, word by word and bit by bit, written from their specifications."""

from pathlib import Path

import numpy as np
import torch

from bladellm_runtime.fields import Fields
from bladellm_runtime.quantization.scheme import Scheme
from bladellm_runtime.quantization.weight import QuantizedWeight

AWQ_SLOTS = {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}
"""Slot of a word -> column of its eight."""


def bits_of(word: int, slot: int, bits: int) -> int:
    """The code in a slot of an int32 word, slot 0 in the lowest bits."""
    return ((word % 2**32) >> (slot * bits)) % 2**bits


def gptq_weight(tensors: dict[str, torch.Tensor], bits: int, v1: bool) -> np.ndarray:
    """float64 [N, K] of a GPTQ layer, as its first readers computed it: scale · (code − (stored zero + 1))."""
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    scales, g_idx = tensors["scales"].double().numpy(), tensors["g_idx"].tolist()
    per_word, columns, rows = 32 // bits, len(g_idx), scales.shape[1]
    weight = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            code = bits_of(qweight[k // per_word][n], k % per_word, bits)
            zero = bits_of(qzeros[g_idx[k]][n // per_word], n % per_word, bits) + (1 if v1 else 0)
            weight[n, k] = scales[g_idx[k], n] * (code - zero)
    return weight


def awq_weight(tensors: dict[str, torch.Tensor], group_size: int) -> np.ndarray:
    """float64 [N, K] of an AWQ GEMM layer."""
    qweight, qzeros = tensors["qweight"].tolist(), tensors["qzeros"].tolist()
    scales = tensors["scales"].double().numpy()
    weight = np.empty((scales.shape[1], len(qweight)))
    for k, words in enumerate(qweight):
        for word in range(len(words)):
            for slot, column in AWQ_SLOTS.items():
                n, group = 8 * word + column, k // group_size
                zero = bits_of(qzeros[group][word], slot, 4)
                weight[n, k] = scales[group, n] * (bits_of(words[word], slot, 4) - zero)
    return weight


def random_weight(
    scheme: Scheme,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float16,
    scrambled: bool = False,
    lowest_zero: int = 0,
    device: str = "cpu",
) -> QuantizedWeight:
    """Codes, scales, zero points and order drawn freely, all values of a code among them by chance."""
    groups = scheme.groups(columns)
    scales = (torch.rand(rows, groups, device=device) + 0.01).to(dtype)
    if scheme.kind == "fp8":
        codes = (torch.randn(rows, columns, device=device) * 50).to(torch.float8_e4m3fn)
    else:
        codes = torch.randint(0, scheme.levels, (rows, columns), dtype=torch.uint8, device=device)
    zeros, order = None, None
    if not scheme.symmetric:
        zeros = torch.randint(lowest_zero, scheme.levels, (rows, groups), dtype=torch.uint8, device=device)
    if scrambled:
        g_idx = (torch.arange(columns) // (columns // groups))[torch.randperm(columns)]
        order = torch.argsort(g_idx, stable=True).to(device)
    input_scale = float(torch.rand(()) + 0.01) if scheme.activations == "static" else None
    return QuantizedWeight(scheme, codes, scales, zeros, order, input_scale)


def fields(values: dict[str, object], file: str = "config.json") -> Fields:
    """A `quantization_config` as the config reader hands it on."""
    return Fields(Path(file), {"quantization_config": values}).nested("quantization_config")


def assert_same(one: QuantizedWeight, other: QuantizedWeight) -> None:
    """Equal in every bit and type."""
    assert one.scheme == other.scheme
    assert one.codes.dtype == other.codes.dtype
    assert torch.equal(one.codes.view(torch.uint8), other.codes.view(torch.uint8))
    assert one.scales.dtype == other.scales.dtype
    assert torch.equal(one.scales, other.scales)
    for mine, yours in ((one.zeros, other.zeros), (one.order, other.order)):
        assert (mine is None) == (yours is None)
        if mine is not None and yours is not None:
            assert mine.dtype == yours.dtype
            assert torch.equal(mine, yours)
    if one.input_scale is None or other.input_scale is None:
        assert one.input_scale is other.input_scale
    else:
        assert abs(one.input_scale - other.input_scale) <= 1e-7 * one.input_scale
