"""`g_idx`, the group of every input, and the order of inputs it stands for."""

import torch

from bladellm_runtime.errors import CheckpointError


def order_of(g_idx: torch.Tensor, groups: int, name: str = "g_idx") -> torch.Tensor | None:
    """The inputs sorted by group, int64 [K], stable within a group; None where they lie in that order already.

    g_idx: integers [K], each below `groups`. Raises `CheckpointError` starting with `name` for groups out of range or
    of unequal sizes.
    """
    g_idx = g_idx.long()
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise CheckpointError(f"{name} must hold groups from 0 to {groups - 1}")
    if not torch.equal(torch.bincount(g_idx, minlength=groups), torch.full_like(g_idx[:groups], len(g_idx) // groups)):
        raise CheckpointError(f"{name} has groups of unequal sizes, which are not supported")
    if bool((g_idx.diff() >= 0).all()):
        return None
    return torch.argsort(g_idx, stable=True)


def g_idx_of(order: torch.Tensor | None, columns: int, groups: int, device: torch.device) -> torch.Tensor:
    """The group of every input, int32 [K]: the inverse of `order_of`."""
    natural = torch.arange(columns, dtype=torch.int32, device=device) // (columns // groups)
    return natural if order is None else torch.empty_like(natural).index_copy_(0, order, natural)


def sort_columns(codes: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Columns of a matrix [N, K] from the order of the inputs into `order`."""
    return codes if order is None else codes.index_select(1, order)


def restore_columns(codes: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Columns of a matrix [N, K] from `order` back into the order of the inputs."""
    return codes if order is None else torch.empty_like(codes).index_copy_(1, order, codes)
