"""What a changed weight does to a linear layer's outputs, from the Gram matrix of its inputs alone.

For outputs W·x the mean over tokens of ‖ΔW·x‖² is tr(ΔW·G·ΔWᵀ), G the mean of x·xᵀ: exact, all tokens counted, at
N·K² multiplications whatever the number of tokens.
"""

from collections.abc import Iterator

import torch
from bladellm_kernels.row_blocks import block_slices

BLOCK = 2**25
"""Weights worked on at a time: a few float32 copies of them are all the memory a search takes beside its inputs."""


def row_errors(difference: torch.Tensor, gram: torch.Tensor) -> torch.Tensor:
    """Mean squared error [N] of each output whose weights are off by difference, float32 [N, K].

    gram: [K, K], float32, or a narrower type whose products are enough.
    """
    return ((difference.to(gram.dtype) @ gram).float() * difference).sum(1)


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of about `BLOCK` weights that together cover all rows."""
    return block_slices(rows, columns, BLOCK)
