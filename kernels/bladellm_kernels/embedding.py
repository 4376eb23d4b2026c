"""Token embedding: rows of a table by token ids, which may themselves be looked up first."""

import torch
import torch.nn.functional as F

from bladellm_kernels.has_triton import has_triton


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    slots: torch.Tensor | None = None,
    *,
    first: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`weight[ids]`, or `weight[ids[slots]]`: the newest token of each sequence, kept on the device by slot.

    ids: int64 [S], each that is read in [0, vocab); weight: [vocab, N], its last stride 1; slots: int64 [T], each in
    [0, S), None for T = S tokens in order. first: weight has only the rows of ids from `first` on, one row or more;
    those of others are zeros. out: [T, N] of weight's type. Returns [T, N]. On CUDA one kernel where triton is
    installed.
    """
    if not (weight.is_cuda and has_triton()):
        rows = _look_up(ids if slots is None else ids.index_select(0, slots), weight, first)
        return rows if out is None else out.copy_(rows)
    from bladellm_kernels.embedding_triton import launch_embedding

    if out is None:
        tokens = ids.shape[0] if slots is None else slots.shape[0]
        out = torch.empty(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
    launch_embedding(ids, weight, slots, out, first)
    return out


def _look_up(ids: torch.Tensor, weight: torch.Tensor, first: int | None) -> torch.Tensor:
    if first is None:
        return F.embedding(ids, weight)
    own = ids - first
    others = (own < 0) | (own >= len(weight))
    return F.embedding(own.masked_fill(others, 0), weight).masked_fill_(others.unsqueeze(1), 0)


def embedding_reference(
    ids: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor | None = None, first: int = 0
) -> torch.Tensor:
    """`embedding`, one token at a time."""
    order = range(len(ids)) if slots is None else slots.tolist()
    places = [int(ids[place]) - first for place in order]
    none = torch.zeros_like(weight[0])
    return torch.stack([weight[place] if 0 <= place < len(weight) else none for place in places])
