"""Copy stretches of sequences' stored keys and values, as plain numbers, into a buffer."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.prefill_tiles import Span

BLOCK_TOKENS = 32
"""Most positions that a program of the CUDA kernel copies."""
BLOCK_FIELDS = 5
"""Base row, slot, first position, end of the positions, row of `out`."""


class Stretch(NamedTuple):
    """Positions [first, end) of the sequence in `slot`, whose position 0 is row `base_row`; hashable."""

    base_row: int
    slot: int
    first: int
    end: int


def list_blocks(stretch: Stretch, row: int) -> NDArray[np.int64]:
    """The blocks of a stretch that goes to `out` from `row` on, [n, BLOCK_FIELDS]."""
    base_row, slot, first, end = stretch
    begin = np.arange(first, end, BLOCK_TOKENS)
    blocks = np.empty((len(begin), BLOCK_FIELDS), np.int64)
    blocks[:, 0], blocks[:, 1], blocks[:, 2] = base_row, slot, begin
    blocks[:, 3], blocks[:, 4] = np.minimum(begin + BLOCK_TOKENS, end), row + begin - first
    return blocks


def kv_dequantize(kv: KvLayer, stretches: Sequence[Stretch], out: torch.Tensor) -> None:
    """Write the stretches to `out`, one behind the other.

    out: [total positions, 2, Hk, D], K at index 0 and V at 1, elements of a head contiguous; a floating type. Gathers
    paged memory, dequantizes quantized formats, reads nothing else, never waits for a device.
    """
    shape = (sum(each.end - each.first for each in stretches), 2, kv.kv_heads, kv.head_dim)
    if out.shape != shape or out.stride(3) != 1:
        raise ValueError(f"out must be {shape} with contiguous heads, got {tuple(out.shape)}")
    if out.is_cuda and (kv.paged or kv.format.quantized) and has_triton():
        from bladellm_kernels.kv_dequantize_triton import launch

        launch(kv, tuple(stretches), out)
    else:
        kv_dequantize_reference(kv, stretches, out)


def kv_dequantize_reference(kv: KvLayer, stretches: Sequence[Stretch], out: torch.Tensor) -> None:
    """`kv_dequantize` by `kv_read`."""
    done = 0
    for base_row, slot, first, end in stretches:
        out[done : done + end - first].copy_(kv_read(kv, base_row, slot, first, end))
        done += end - first


def dequantized_layers(
    kv: KvLayer, spans: Sequence[Span], window: int | None, dtype: torch.dtype, most_elements: int
) -> Iterator[tuple[KvLayer, list[Span]]]:
    """Plain layers with what chunks of a quantized one see, and the chunks in them; one may be used at a time.

    A layer is a buffer of at most `most_elements` numbers of `dtype`, or what one chunk takes. With a window, a chunk's
    base row may lie before the buffer, since only the rows from the first that it sees are there.
    """
    rows = most_elements // (2 * kv.kv_heads * kv.head_dim)
    for group in _groups([(span, _seen(span, window)) for span in spans], rows):
        moved: list[Span] = []
        total = 0
        for span, stretch in group:
            moved.append(span._replace(base_row=total - stretch.first))
            total += stretch.end - stretch.first
        buffer = torch.empty(total, 2, kv.kv_heads, kv.head_dim, dtype=dtype, device=kv.payload.device)
        kv_dequantize(kv, [stretch for _, stretch in group], buffer)
        yield KvLayer(buffer, NO_QUANT, kv.granule_tokens), moved


def _seen(span: Span, window: int | None) -> Stretch:
    first = 0 if window is None else max(0, span.start - window + 1)
    return Stretch(span.base_row, span.slot, first, span.start + span.query_len)


def _groups(stretches: Sequence[tuple[Span, Stretch]], rows: int) -> Iterator[list[tuple[Span, Stretch]]]:
    """In order, as many together as have their positions in `rows`."""
    group: list[tuple[Span, Stretch]] = []
    taken = 0
    for span, stretch in stretches:
        length = stretch.end - stretch.first
        if group and taken + length > rows:
            yield group
            group, taken = [], 0
        group.append((span, stretch))
        taken += length
    if group:
        yield group
