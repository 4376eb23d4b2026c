"""Token embedding."""

import torch
from bladellm_kernels.embedding import embedding


class Embedding:
    """Looks token ids up; weight [vocab, hidden]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, input_ids: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        """input_ids int64 [T], each below vocab, those below 0 of padding, which is zeros -> [T, hidden]; of slots,
        int64 [T], those of input_ids that these say."""
        return embedding(input_ids, self.weight, slots, first=0)
