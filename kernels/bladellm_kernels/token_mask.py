"""Take tokens out of a step's choice: their logits become -inf, by the bits of one mask a row."""

import torch
from torch import Tensor

from bladellm_kernels.has_triton import has_triton

TYPES = (torch.float32, torch.bfloat16, torch.float16)
WORD_BITS = 32


def mask_tokens_(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    """Add -inf to the logits of tokens that are not allowed, in place.

    logits: [R, V] of a float type, each row dense; rows may have a stride. masks: int32 [M, W], contiguous, W at least
    V / 32: token t is allowed where bit t mod 32 of word t // 32 is set. rows: int64 [M], the row of `logits` that a
    mask is for, all different. Rows without a mask keep their bits. An addition: NaN stays NaN and +inf becomes it, so
    that logits which are not finite can still be told. Where triton is installed on CUDA it
    is one kernel, and nothing is waited for. Raises ValueError naming the argument that is wrong.
    """
    _check(logits, masks, rows)
    if not len(rows):
        return
    if logits.is_cuda and has_triton():
        from bladellm_kernels.token_mask_triton import launch_token_mask

        launch_token_mask(logits, masks, rows)
        return
    token = torch.arange(logits.shape[1], device=logits.device)
    shifts = (token % WORD_BITS).int()
    for mask, row in zip(masks, rows.tolist(), strict=True):  # bits of all rows at once take 40 times the masks
        forbidden = (mask[token // WORD_BITS] >> shifts) & 1 == 0
        logits[row] += forbidden.to(logits.dtype).masked_fill_(forbidden, -torch.inf)


def token_mask_reference(logits: Tensor, masks: Tensor, rows: Tensor) -> Tensor:
    """What `mask_tokens_` makes of logits, one token at a time."""
    out = logits.clone()
    for mask, row in zip(masks.tolist(), rows.tolist(), strict=True):
        for token in range(logits.shape[1]):
            if not mask[token // WORD_BITS] >> token % WORD_BITS & 1:
                out[row, token] += -torch.inf
    return out


def _check(logits: Tensor, masks: Tensor, rows: Tensor) -> None:
    if logits.ndim != 2 or logits.dtype not in TYPES or (len(logits) and logits.stride(1) != 1):
        raise ValueError(f"logits must be dense rows of floats, got {logits.dtype} {list(logits.shape)}")
    if masks.ndim != 2 or masks.dtype != torch.int32 or not masks.is_contiguous():
        raise ValueError(f"masks must be int32 [M, W] and contiguous, got {masks.dtype} {list(masks.shape)}")
    if masks.shape[1] * WORD_BITS < logits.shape[1]:
        raise ValueError(f"masks must be bits for {logits.shape[1]} tokens, got {masks.shape[1]} words")
    if rows.shape != masks.shape[:1] or rows.dtype != torch.int64:
        raise ValueError(f"rows must be int64 [{len(masks)}], got {rows.dtype} {list(rows.shape)}")
