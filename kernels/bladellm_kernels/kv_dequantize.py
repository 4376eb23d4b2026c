"""Copy stretches of sequences' stored keys and values, as plain numbers, into a buffer."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.prefill_tiles import Span


class Stretch(NamedTuple):
    """Positions [first, end) of the sequence in `slot`, whose position 0 is row `base_row`; hashable."""

    base_row: int
    slot: int
    first: int
    end: int


def kv_dequantize(kv: KvLayer, stretches: Sequence[Stretch], out: torch.Tensor) -> None:
    """Write the stretches to `out`, one behind the other.

    out: [total positions, 2, Hk, D], K at index 0 and V at 1, elements of a head contiguous; a floating type. Gathers
    paged memory, dequantizes quantized formats, reads nothing else, never waits for a device.
    """
    shape = (sum(each.end - each.first for each in stretches), 2, kv.kv_heads, kv.head_dim)
    if out.shape != shape or out.stride(3) != 1:
        raise ValueError(f"out must be {shape} with contiguous heads, got {tuple(out.shape)}")
    if out.is_cuda and (kv.paged or kv.format.quantized) and find_spec("triton") is not None:
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
    kv: KvLayer, spans: Sequence[Span], dtype: torch.dtype, most_elements: int
) -> Iterator[tuple[KvLayer, list[Span]]]:
    """Plain layers with the KV of chunks of a quantized one, and the chunks in them; one may be used at a time.

    A layer is a buffer of at most `most_elements` numbers of `dtype`, or what one chunk takes.
    """
    rows = most_elements // (2 * kv.kv_heads * kv.head_dim)
    for group in _groups(spans, rows):
        stretches = [Stretch(span.base_row, span.slot, 0, span.start + span.query_len) for span in group]
        moved: list[Span] = []
        total = 0
        for span, stretch in zip(group, stretches, strict=True):
            moved.append(span._replace(base_row=total))
            total += stretch.end
        buffer = torch.empty(total, 2, kv.kv_heads, kv.head_dim, dtype=dtype, device=kv.payload.device)
        kv_dequantize(kv, stretches, buffer)
        yield KvLayer(buffer, NO_QUANT, kv.granule_tokens), moved


def _groups(spans: Sequence[Span], rows: int) -> Iterator[list[Span]]:
    """Chunks in order, as many together as have their positions in `rows`."""
    group: list[Span] = []
    taken = 0
    for span in spans:
        length = span.start + span.query_len
        if group and taken + length > rows:
            yield group
            group, taken = [], 0
        group.append(span)
        taken += length
    if group:
        yield group
