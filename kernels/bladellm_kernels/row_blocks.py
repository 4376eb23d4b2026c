"""How many rows of logits an operator made of several PyTorch passes works on at a time."""

from collections.abc import Iterator

import torch

_CPU_BLOCK = 1 << 18
_CUDA_BLOCK = 1 << 23
"""Elements of a block: on the CPU what the cache holds, on CUDA a bound on the workspace (about 350 MiB for a sort)."""


def row_blocks(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices that cover `rows` rows in order; none when there are no rows."""
    block = max(1, (_CPU_BLOCK if device.type == "cpu" else _CUDA_BLOCK) // columns)
    for first in range(0, rows, block):
        yield slice(first, min(first + block, rows))
