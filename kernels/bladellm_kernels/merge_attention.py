"""Merge attention over disjoint parts of a sequence, each with its own softmax, into attention over all of it.

With o_i the output of part i and l_i the logarithm of its sum of exponentials, the whole is Σ exp(l_i − l) · o_i where
exp(l) = Σ exp(l_i).
"""

from collections.abc import Sequence

import torch

from bladellm_kernels.has_triton import has_triton


def merge_attention(
    outs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The whole from parts: outs, S tensors [T, Hq, D] of one type; lses, S float32 tensors [T, Hq].

    lses are natural logarithms, −inf where a part holds nothing for a query, whose output there does not count. Where
    no part holds anything the result is zero. Tensors may be strided, outs contiguous in the last dimension. Computed
    in float32. Returns [T, Hq, D] of the type of outs, in `out` if given, which may be one of outs; the logarithms of
    the whole go to `lse`, float32 [T, Hq], if given.
    """
    _check(outs, lses)
    out = torch.empty_like(outs[0]) if out is None else out
    if out.is_cuda and has_triton():
        from bladellm_kernels.merge_attention_triton import merge_parts

        merge_parts(outs, lses, out, lse)
        return out
    logs = torch.stack(list(lses))
    if lse is not None:
        lse.copy_(logs.logsumexp(0))
    highest = logs.amax(0)
    weights = (logs - torch.where(highest.isinf(), 0.0, highest)).exp_()
    weights /= torch.where(highest.isinf(), 1.0, weights.sum(0))
    whole = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for part, weight in zip(outs, weights.unsqueeze(-1), strict=True):
        whole += torch.where(weight > 0, part.float() * weight, 0.0)
    return out.copy_(whole)


def merge_attention_reference(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """`merge_attention` from its definition, in float64: no part may be empty. Returns float64 [T, Hq, D]."""
    sums = torch.stack(list(lses)).double().exp().unsqueeze(-1)
    return (torch.stack(list(outs)).double() * sums).sum(0) / sums.sum(0)


def _check(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> None:
    if not outs or len(outs) != len(lses):
        raise ValueError(f"there must be as many outputs as logarithms, and at least one: {len(outs)} and {len(lses)}")
    for part, lse in zip(outs, lses, strict=True):
        if part.shape != outs[0].shape or lse.shape != part.shape[:2]:
            raise ValueError(
                f"{tuple(outs[0].shape)} outputs do not go with {tuple(part.shape)}, logarithms {tuple(lse.shape)}"
            )
        if part.dtype != outs[0].dtype or lse.dtype != torch.float32:
            raise ValueError(f"outputs must be of one type and logarithms float32, got {part.dtype} and {lse.dtype}")
        if part.stride(-1) != 1:
            raise ValueError("outputs must be contiguous in the last dimension")
