"""`PagedArena`: KV memory whose granules lie anywhere, found through a table: the classical page table."""

from typing import ClassVar

import numpy as np
import torch

from bladellm_runtime.kv.arena import Ints, KvShape
from bladellm_runtime.kv.granule_arena import GranuleArena
from bladellm_runtime.kv.operations import Show
from bladellm_runtime.kv.spec import KvSpec


class PagedArena(GranuleArena):
    """One tensor a layer, [num_granules * granule_tokens, 2, Hk, W]. Showing and hiding only change the table."""

    paged: ClassVar[bool] = True
    sticky: ClassVar[bool] = True

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device) -> None:
        super().__init__(spec, shape, device)
        payloads = layer_tensors(spec, shape, device)
        self._present(payloads, [rows.unflatten(0, (-1, spec.granule_tokens)) for rows in payloads])

    def base_row(self, slot: int) -> int:
        """0: rows are found through the table."""
        return 0

    def base_rows(self, slots: Ints) -> Ints:
        return np.zeros_like(slots)

    def _show(self, view: Show) -> None:
        """The table is all there is."""

    def _hide(self, slot: int, keep: int) -> None:
        """The table is all there is."""


def layer_tensors(spec: KvSpec, shape: KvShape, device: torch.device) -> list[torch.Tensor]:
    """A tensor of zeros for each layer, [num_granules * granule_tokens, 2, Hk, W]."""
    width = shape.format.width(shape.head_dim)
    dimensions = (spec.num_granules * spec.granule_tokens, 2, shape.kv_heads, width)
    count = sum(len(group.layers) for group in spec.groups)
    return [torch.zeros(dimensions, dtype=shape.format.dtype(shape.dtype), device=device) for _ in range(count)]
