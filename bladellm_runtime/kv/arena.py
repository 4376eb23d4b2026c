"""The arena interface: KV memory that grows per slot and stays contiguous in each slot's address range."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from bladellm_runtime.kv.spec import KvSpec


class KvArena(ABC):
    """Physical KV memory behind a `KvSpec`.

    Every layer is seen as one tensor of *rows* (`layer_kv`), a row being one token's K and V; a slot's token at
    position p is row `base_row(slot) + p`. Only rows inside a slot's mapped granules may be touched.
    """

    relocates: ClassVar[bool] = False
    """Whether held granules are in the way of others; idle slots should then keep none (`KvAccounting.retain`)."""

    def __init__(self, spec: KvSpec, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = device

    @abstractmethod
    def map(self, slot: int, granules: int) -> None:
        """Grow a slot to `granules` granules, keeping its contents. Raises `MemoryError` when the pool is empty,
        leaving the slot as it was."""

    @abstractmethod
    def unmap(self, slot: int, granules: int) -> None:
        """Shrink a slot to its first `granules` granules; the rest go back to the pool."""

    @abstractmethod
    def alias(self, source: int, target: int, granules: int) -> None:
        """Give an empty slot the first `granules` granules of another: shared memory where the arena can map a
        granule twice, a copy where it cannot."""

    @abstractmethod
    def base_row(self, slot: int) -> int:
        """Row of the slot's position 0 in every `layer_kv` tensor; may change after `map` on relocating arenas."""

    @abstractmethod
    def layer_kv(self, layer: int) -> torch.Tensor:
        """One layer's rows, `[rows, 2, kv_heads, head_dim]`, K at index 0 and V at 1; stable over the arena's life."""

    @abstractmethod
    def mapped(self, slot: int) -> int:
        """Granules the slot holds."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Tensors from `layer_kv` must not be used afterwards."""

    def view(self, slot: int, layer: int, tokens: int) -> torch.Tensor:
        """The first `tokens` tokens of a slot in one layer, `[tokens, 2, kv_heads, head_dim]`, without a copy."""
        base = self.base_row(slot)
        return self.layer_kv(layer)[base : base + tokens]

    def apply(self, unmaps: Sequence[tuple[int, int]], maps: Sequence[tuple[int, int]]) -> None:
        """Execute a step plan's memory lists, unmaps first."""
        for slot, granules in unmaps:
            self.unmap(slot, granules)
        for slot, granules in maps:
            self.map(slot, granules)
