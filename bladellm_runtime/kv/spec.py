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
    `block_granules` consecutive granules, the first a multiple of that, are a *block*: mapped with one call a group
    when taken whole; the first `split_blocks` are made for single granules at first. `scale_token_bytes`: one token's
    scales over all layers, kept by granule outside the groups.
    `host_granules`: granules of host memory to swap cached prompts to.
    """

    groups: tuple[KvGroup, ...]
    granule_tokens: int
    num_granules: int
    num_slots: int
    max_tokens: int
    block_granules: int = 1
    split_blocks: int = 0
    scale_token_bytes: int = 0
    host_granules: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes one token takes over all groups, with its scales."""
        return sum(group.token_bytes for group in self.groups) + self.scale_token_bytes

    @property
    def granule_bytes(self) -> int:
        """Bytes one granule takes over all groups, with its scales."""
        return self.granule_tokens * self.token_bytes

    def granules(self, tokens: int) -> int:
        """Granules that hold `tokens` tokens."""
        return -(-tokens // self.granule_tokens)
