"""Write new keys and values into a layer's KV rows."""

import torch


def kv_write(kv_layer: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Store token t's key and value in row `rows[t]`, in place.

    kv_layer: [R, 2, H, D], K at index 0 and V at 1, rows may be strided; rows: int64 [T], distinct, each in [0, R);
    k, v: [T, H, D] of kv_layer's type. Touches no other row.
    """
    kv_layer[:, 0].index_copy_(0, rows, k)
    kv_layer[:, 1].index_copy_(0, rows, v)


def kv_write_reference(kv_layer: torch.Tensor, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """`kv_write`, one token at a time."""
    for token, row in enumerate(rows.tolist()):
        kv_layer[row, 0] = k[token]
        kv_layer[row, 1] = v[token]
