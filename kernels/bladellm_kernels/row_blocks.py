"""How many rows an operator made of several PyTorch passes works on at a time."""

from collections.abc import Iterator

import torch

_CPU_BLOCK = 1 << 18
_CUDA_BLOCK = 1 << 23
"""Logits in a block: on the CPU what the cache holds, on CUDA a bound on the workspace (about 350 MiB for a sort)."""


def row_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows` rows of logits in order; none when there are no rows."""
    return block_slices(rows, columns, _CPU_BLOCK if device.type == "cpu" else _CUDA_BLOCK)


def block_slices(rows: int, columns: int, elements: int) -> Iterator[slice]:
    """Slices of at most `elements` numbers, or of one row, that cover `rows` rows in order."""
    block = max(1, elements // columns)
    for first in range(0, rows, block):
        yield slice(first, min(first + block, rows))
