"""`UploadedMasks`: the token masks of a step on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from bladellm_kernels.token_mask import mask_tokens_
from torch import Tensor

from bladellm_runtime.engine.upload import upload
from bladellm_runtime.scheduler.plan import Ints, TokenMasks

ALL_TOKENS = -1


@dataclass(frozen=True, slots=True)
class UploadedMasks:
    """masks: int32 [M, words]; rows: int64 [M], the row of the step's logits that each is for. pinned: host memory that
    the upload may still read."""

    masks: Tensor
    rows: Tensor
    pinned: Tensor | None = None

    def apply(self, logits: Tensor) -> None:
        """Take the tokens that are not allowed out of logits [R, vocabulary], in place."""
        mask_tokens_(logits, self.masks, self.rows)


def upload_masks(masks: TokenMasks, sampling_rows: Ints, device: torch.device) -> UploadedMasks | None:
    """Queue the upload of a step's masks on the current stream; None where it has none. sampling_rows: plan rows of the
    logits, ascending."""
    if not masks.rows:
        return None
    rows = np.searchsorted(sampling_rows, np.array(masks.rows, dtype=np.int64))
    sent, pinned = upload([masks.masks, rows], device)
    return UploadedMasks(sent[0], sent[1], pinned)


def warm_up_masks(vocab_size: int, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
    """Mask logits of these types once, so that no request's are the first."""
    for dtype in dict.fromkeys(dtypes):
        masks = TokenMasks([0], np.full((1, -(-vocab_size // 32)), ALL_TOKENS, np.int32))
        uploaded = upload_masks(masks, np.zeros(1, dtype=np.int64), device)
        assert uploaded is not None, "there is a row"
        uploaded.apply(torch.zeros(1, vocab_size, dtype=dtype, device=device))
