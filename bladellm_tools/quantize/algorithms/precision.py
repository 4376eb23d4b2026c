"""How exactly float32 matrices are multiplied: everything, or as TF32 on CUDA."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def matmul_precision(level: Literal["highest", "high"]) -> Iterator[None]:
    """Products of float32 matrices inside are full ones (highest), or may be TF32 (high)."""
    previous = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(level)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(previous)
