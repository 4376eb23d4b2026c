"""Devices, types and tolerances of the operator tests."""

from dataclasses import dataclass

import torch

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}


@dataclass
class Chunk:
    first: int
    query_len: int
    start: int
    base_row: int


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Close for values of magnitude 1 computed in `dtype`; `expected` is float32."""
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def kv_rows(rows: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str, strided: bool) -> torch.Tensor:
    """A layer's rows, all NaN, as rows nobody may read; `strided` as if another layer lay between them."""
    layers = 2 if strided else 1
    return torch.full((rows, layers, 2, kv_heads, head_dim), torch.nan, dtype=dtype, device=device)[:, layers - 1]
