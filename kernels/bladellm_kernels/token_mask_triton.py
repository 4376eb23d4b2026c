"""The CUDA kernel of `mask_tokens_`."""

import torch
import triton
import triton.language as tl

from bladellm_kernels.early_launch import early_launch, let_next_start, wait_for_inputs

BLOCK, WARPS = 4096, 4
"""Tokens and warps of a program."""


@triton.jit  # type: ignore[untyped-decorator]
def token_mask_kernel(
    logits: tl.tensor, masks: tl.tensor, rows: tl.tensor, stride: tl.tensor, words: tl.tensor, vocab: tl.tensor,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Program (mask, block of tokens). Logits of allowed tokens are neither read nor written."""
    let_next_start(EARLY)
    mask = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    wait_for_inputs(EARLY)
    row = tl.load(rows + mask)
    word = tl.load(masks + mask * words + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    place = logits + row * stride + token
    before = tl.load(place, mask=forbidden, other=0.0).to(tl.float32)
    tl.store(place, before + float("-inf"), mask=forbidden)


def launch_token_mask(logits: torch.Tensor, masks: torch.Tensor, rows: torch.Tensor, block: int = BLOCK) -> None:
    """As `mask_tokens_`, with one mask or more."""
    count, words = masks.shape
    vocab = logits.shape[1]
    token_mask_kernel[(count, -(-vocab // block))](
        logits, masks, rows, logits.stride(0), words, vocab, block, num_warps=WARPS, **early_launch(logits.device)
    )
