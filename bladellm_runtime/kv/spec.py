"""Sizes of the KV cache, without torch: what accounting, arenas and the memory table agree on."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose KV share a granule. `token_bytes` counts one token over all layers of the group."""

    layers: tuple[int, ...]
    token_bytes: int


@dataclass(frozen=True, slots=True)
class KvSpec:
    """The KV cache of a model: its layer groups, and the geometry arenas carve them into.

    A *granule* is the unit of mapping: `granule_tokens` consecutive tokens of one sequence in every group.
    `max_tokens` is the longest sequence (a multiple of `granule_tokens`), the address range a slot reserves.
    """

    groups: tuple[KvGroup, ...]
    granule_tokens: int
    num_granules: int
    num_slots: int
    max_tokens: int

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all groups."""
        return sum(group.token_bytes for group in self.groups)

    @property
    def granule_bytes(self) -> int:
        """Bytes one granule takes over all groups."""
        return self.granule_tokens * self.token_bytes

    def granules(self, tokens: int) -> int:
        """Granules that hold `tokens` tokens."""
        return -(-tokens // self.granule_tokens)
