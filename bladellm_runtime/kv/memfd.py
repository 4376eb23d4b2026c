"""`MemfdArena`: KV memory on a Linux CPU, pieces of one memory file mapped into a reserved address range per slot.

The CPU twin of CUDA virtual memory management: the same granules, pool, aliasing and failure modes.
"""

import contextlib
import mmap
import os
import weakref

import torch

from bladellm_runtime.kv.arena import KvArena
from bladellm_runtime.kv.granules import GranulePool, added_pieces, runs
from bladellm_runtime.kv.sizing import mapping_limit
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from bladellm_runtime.kv.virtual import AddressRange


class MemfdArena(KvArena):
    """Every group reserves the addresses of all slots at full length; slot s starts at row `s * max_tokens`, for ever.

    Granule g of a group is a fixed piece of the file. The file's pages come into being when first written, so a large
    pool costs nothing until it is used; freed pages stay, for the pool is a budget already granted.
    """

    def __init__(self, spec: KvSpec, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(spec, kv_heads, head_dim, dtype, device)
        for group in spec.groups:
            _check_group(spec, group, 2 * kv_heads * head_dim * dtype.itemsize)
        self._slot_granules = spec.max_tokens // spec.granule_tokens
        self._pool = GranulePool(spec.num_granules)
        self._owned: list[list[int]] = [[] for _ in range(spec.num_slots)]
        self._pieces = 0
        self._showing = 0
        self._closed = False
        self._limit = mapping_limit()
        self._ranges = [AddressRange(spec.num_slots * spec.max_tokens * group.token_bytes) for group in spec.groups]
        self._fd = os.memfd_create("bladellm-kv")
        self._close_file = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, spec.num_granules * spec.granule_bytes)
        self._layers = self._layer_tensors()

    def map(self, slot: int, granules: int) -> None:
        owned = self._slot(slot, granules)
        if granules > len(owned):
            self._show(slot, self._pool.take(granules - len(owned), after=owned[-1] if owned else None))

    def unmap(self, slot: int, granules: int) -> None:
        owned = self._slot(slot, granules)
        removed = owned[granules:]
        if not removed:
            return
        pieces = added_pieces(owned[:granules], removed)
        self._hide(slot, granules, len(removed))
        del owned[granules:]
        self._pieces -= pieces
        self._showing -= not owned
        self._pool.give(removed)

    def alias(self, source: int, target: int, granules: int) -> None:
        shared = self._slot(source, granules)[:granules]
        if len(shared) < granules or self._slot(target, granules):
            raise ValueError(f"slot {source} cannot lend {granules} granules to slot {target}")
        if shared:
            self._pool.share(shared)
            self._show(target, shared)

    def base_row(self, slot: int) -> int:
        return slot * self.spec.max_tokens

    def layer_kv(self, layer: int) -> torch.Tensor:
        return self._layers[layer]

    def mapped(self, slot: int) -> int:
        return len(self._owned[slot])

    @property
    def mappings(self) -> int:
        """Memory mappings of the process that are this arena's, at most."""
        return len(self.spec.groups) * (self._pieces + self._showing + 1)

    def close(self) -> None:
        self._closed = True
        self._layers.clear()
        for addresses in self._ranges:
            addresses.close()
        self._close_file()

    def _slot(self, slot: int, granules: int) -> list[int]:
        """The granules of a slot, once the arguments are known to be inside the arena."""
        if self._closed:
            raise ValueError("the KV arena is closed")
        if not 0 <= slot < self.spec.num_slots or not 0 <= granules <= self._slot_granules:
            raise ValueError(f"slot {slot} with {granules} granules is outside the KV arena")
        return self._owned[slot]

    def _show(self, slot: int, granules: list[int]) -> None:
        """Append granules, already counted as the slot's, to what it shows; gives them back if that cannot be."""
        owned = self._owned[slot]
        added = added_pieces(owned, granules)
        try:
            if self.mappings + len(self.spec.groups) * (added + (not owned)) > self._limit:
                raise MemoryError(f"more than {self._limit} mappings, half of vm.max_map_count")
            self._map_runs(slot, len(owned), granules)
        except (OSError, MemoryError) as error:
            self._hide(slot, len(owned), len(granules))
            self._pool.give(granules)
            raise MemoryError(f"KV memory of slot {slot} cannot be mapped: {error}") from error
        self._showing += not owned
        self._pieces += added
        owned.extend(granules)

    def _map_runs(self, slot: int, position: int, granules: list[int]) -> None:
        """One mmap a run and group. In the file the groups follow each other, each with all its granules in order."""
        found = runs(granules)
        group_start = 0
        for group, addresses in zip(self.spec.groups, self._ranges, strict=True):
            size = self.spec.granule_tokens * group.token_bytes
            slot_start = (slot * self._slot_granules + position) * size
            for index, granule, length in found:
                addresses.map(slot_start + index * size, length * size, self._fd, group_start + granule * size)
            group_start += self.spec.num_granules * size

    def _hide(self, slot: int, position: int, count: int) -> None:
        """Make touching `count` granules of a slot a fault again.

        That is a guard against bugs, not what frees memory: should the system refuse, which it does when the process
        has used up its mappings, the old pages stay visible until the slot's next granules replace them.
        """
        for group, addresses in zip(self.spec.groups, self._ranges, strict=True):
            size = self.spec.granule_tokens * group.token_bytes
            with contextlib.suppress(OSError):
                addresses.unmap((slot * self._slot_granules + position) * size, count * size)

    def _layer_tensors(self) -> list[torch.Tensor]:
        """Strided views of the reserved ranges: the layers of a group take turns within each token."""
        layers: dict[int, torch.Tensor] = {}
        layer_elements = 2 * self.kv_heads * self.head_dim
        for group, addresses in zip(self.spec.groups, self._ranges, strict=True):
            flat = torch.frombuffer(addresses.buffer(), dtype=self.dtype)
            rows = self.spec.num_slots * self.spec.max_tokens
            shape = (rows, 2, self.kv_heads, self.head_dim)
            strides = (group.token_bytes // self.dtype.itemsize, self.kv_heads * self.head_dim, self.head_dim, 1)
            for index, layer in enumerate(group.layers):
                layers[layer] = flat.as_strided(shape, strides, index * layer_elements)
        return [layers[layer] for layer in sorted(layers)]


def _check_group(spec: KvSpec, group: KvGroup, layer_token_bytes: int) -> None:
    if group.token_bytes != len(group.layers) * layer_token_bytes:
        raise ValueError(f"layers {group.layers} take {layer_token_bytes} bytes a token each, not {group.token_bytes}")
    if spec.granule_tokens * group.token_bytes % mmap.PAGESIZE or spec.max_tokens % spec.granule_tokens:
        raise ValueError("granules of mapped memory are whole pages, and slots whole granules")
