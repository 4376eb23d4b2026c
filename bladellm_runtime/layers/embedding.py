"""Token embedding."""

import torch
from bladellm_kernels.embedding import embedding


class Embedding:
    """Looks token ids up; weight [vocab, hidden]."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(
        self, input_ids: torch.Tensor, slots: torch.Tensor | None = None, padded: bool = False
    ) -> torch.Tensor:
        """input_ids int64 [T], each in [0, vocab) -> [T, hidden]; of slots, int64 [T], those of input_ids that these
        say. padded: ids below 0 are of padding, which is zeros."""
        return embedding(input_ids, self.weight, slots, first=0 if padded else None)
