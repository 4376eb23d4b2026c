"""Numbers made of codes for attention in one pass in captured steps: which rows of a buffer have them, as a list in
device memory.

Rows [0, tokens) are those of the step's tokens: a chunk with nothing before it has its keys there, as it has in what
the step computed (`attends_fresh`), so that one list of programs serves for both. What chunks behind a prefix see lies
behind them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bladellm_kernels.has_triton import has_triton
from bladellm_kernels.kv_dequantize import BLOCK_FIELDS, BLOCK_TOKENS, Stretch, list_blocks
from bladellm_kernels.kv_format import NO_QUANT
from bladellm_kernels.kv_layer import KvLayer
from bladellm_kernels.kv_read import kv_read
from bladellm_kernels.multiprocessors import multiprocessors
from bladellm_kernels.prefill_tiles import Span

SEEN_ROWS = 8192
"""Behind those of the step's tokens, for what chunks behind a prefix see: of more, attention reads the codes."""
PROGRAMS_PER_SM = 4
"""That copy blocks: one for each that there may be would take longer to start than to work."""
SPARE_BLOCKS = 64
"""For chunks that end within a block."""


class Placed(NamedTuple):
    """Chunks whose base rows are rows of the buffer; those that have no room there; the blocks that fill it, int64
    [n, BLOCK_FIELDS]."""

    chunks: tuple[Span, ...]
    others: tuple[Span, ...]
    blocks: NDArray[np.int64]


def most_blocks(tokens: int) -> int:
    """Room for the blocks of a step of so many tokens."""
    return (tokens + SEEN_ROWS) // BLOCK_TOKENS + SPARE_BLOCKS


def place_chunks(spans: Sequence[Span], tokens: int) -> Placed:
    """Where what each chunk sees lies, in a step of up to `tokens` tokens."""
    chunks: list[Span] = []
    others: list[Span] = []
    blocks = [np.empty((0, BLOCK_FIELDS), np.int64)]
    row, left = tokens, most_blocks(tokens)
    for span in spans:
        end = span.start + span.query_len
        first = row if span.start else span.first
        count = -(-end // BLOCK_TOKENS)
        if count > left or (span.start and row + end > tokens + SEEN_ROWS):
            others.append(span)
            continue
        blocks.append(list_blocks(Stretch(span.base_row, span.slot, 0, end), first))
        chunks.append(span._replace(base_row=first))
        left -= count
        row += end if span.start else 0
    return Placed(tuple(chunks), tuple(others), np.concatenate(blocks))


def listed_numbers(kv: KvLayer, blocks: torch.Tensor, tokens: int, dtype: torch.dtype) -> KvLayer:
    """A plain layer of `dtype` with the blocks of a step of up to `tokens` tokens; blocks: int64 [n, BLOCK_FIELDS] on
    the device, those without positions are none. On CUDA it launches only, and can be captured."""
    shape = (tokens + SEEN_ROWS, 2, kv.kv_heads, kv.head_dim)
    numbers = torch.empty(shape, dtype=dtype, device=kv.payload.device)
    if numbers.is_cuda and has_triton():
        from bladellm_kernels.kv_dequantize_triton import launch_blocks

        launch_blocks(kv, blocks, numbers, PROGRAMS_PER_SM * multiprocessors(numbers.device))
    else:
        for base_row, slot, first, end, row in blocks.tolist():
            numbers[row : row + end - first] = kv_read(kv, base_row, slot, first, end, dtype)
    return KvLayer(numbers, NO_QUANT, kv.granule_tokens)
