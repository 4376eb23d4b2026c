"""Token embedding: rows of a table by token ids, which may themselves be looked up first."""

import torch
import torch.nn.functional as F

from bladellm_kernels.has_triton import has_triton


def embedding(
    ids: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`weight[ids]`, or `weight[ids[slots]]`: the newest token of each sequence, kept on the device by slot.

    ids: int64 [S], each that is read in [0, vocab); weight: [vocab, N], its last stride 1; slots: int64 [T], each in
    [0, S), None for T = S tokens in order. out: [T, N] of weight's type. Returns [T, N]. On CUDA one kernel where
    triton is installed.
    """
    if not (weight.is_cuda and has_triton()):
        rows = F.embedding(ids if slots is None else ids.index_select(0, slots), weight)
        return rows if out is None else out.copy_(rows)
    from bladellm_kernels.embedding_triton import launch_embedding

    if out is None:
        tokens = ids.shape[0] if slots is None else slots.shape[0]
        out = torch.empty(tokens, weight.shape[1], dtype=weight.dtype, device=weight.device)
    launch_embedding(ids, weight, slots, out)
    return out


def embedding_reference(ids: torch.Tensor, weight: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
    """`embedding`, one token at a time."""
    order = range(len(ids)) if slots is None else slots.tolist()
    return torch.stack([weight[int(ids[place])] for place in order])
