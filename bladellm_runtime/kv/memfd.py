"""`MemfdArena`: KV memory on a Linux CPU, pieces of one memory file mapped into a reserved address range per slot.

The CPU twin of CUDA virtual memory management: the same granules, sharing and failure modes.
"""

import contextlib
import mmap
import os
import time
import weakref

import torch

from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.kv.granule_arena import GranuleArena
from bladellm_runtime.kv.granule_table import runs
from bladellm_runtime.kv.mapped_layers import granule_views, layer_views
from bladellm_runtime.kv.operations import Show
from bladellm_runtime.kv.sizing import mapping_limit
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.kv.virtual import AddressRange


class MemfdArena(GranuleArena):
    """Every group reserves the addresses of all slots at full length; slot s starts at row `s * max_tokens`, for ever.

    Granule g of a group is a fixed piece of the file: in the file the groups follow each other, each with all its
    granules in order, and *home* shows the whole file. Its pages come into being when first written, so a large pool
    costs nothing until it is used; pages once written stay, for the pool is a budget already granted.
    """

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device) -> None:
        super().__init__(spec, shape, device)
        if any(spec.granule_tokens * group.token_bytes % mmap.PAGESIZE for group in spec.groups):
            raise ValueError(f"granules of mapped memory are whole pages of {mmap.PAGESIZE} bytes in every group")
        self._slot_granules = spec.max_tokens // spec.granule_tokens
        self._pieces = [0] * spec.num_slots
        self._limit = mapping_limit()
        self._ranges = [AddressRange(spec.num_slots * spec.max_tokens * group.token_bytes) for group in spec.groups]
        sizes = [spec.num_granules * spec.granule_tokens * group.token_bytes for group in spec.groups]
        self._fd = os.memfd_create("bladellm-kv")
        self._close_file = weakref.finalize(self, os.close, self._fd)
        os.ftruncate(self._fd, sum(sizes))
        self._home = AddressRange(sum(sizes))
        self._home.map(0, sum(sizes), self._fd, 0)
        homes = torch.frombuffer(self._home.buffer(), dtype=torch.uint8).split(sizes)
        flat = [torch.frombuffer(addresses.buffer(), dtype=torch.uint8) for addresses in self._ranges]
        self._present(layer_views(flat, spec, shape), granule_views(homes, spec))

    @property
    def mappings(self) -> int:
        """Memory mappings of the process that are this arena's, at most."""
        showing = sum(pieces > 0 for pieces in self._pieces)
        return len(self.spec.groups) * (sum(self._pieces) + showing + 1) + 1

    def close(self) -> None:
        super().close()
        for addresses in (*self._ranges, self._home):
            addresses.close()
        self._close_file()

    def _show(self, view: Show) -> None:
        end = max(self._table.length(view.slot), view.position + len(view.granules))
        pieces = self._table.pieces(view.slot, end, view)
        before, self._pieces[view.slot] = self._pieces[view.slot], pieces
        if self.mappings > self._limit and pieces > before:
            self._pieces[view.slot] = before
            raise MemoryError(f"more than {self._limit} mappings, half of vm.max_map_count")
        # Counted before, for a failure on the way leaves an unknown number; hiding the slot's rest sets that right.
        for index, granule, length in runs(view.granules):
            self._map(view.slot, view.position + index, granule, length)

    def _map(self, slot: int, position: int, granule: int, count: int) -> None:
        """Show consecutive granules, with one mmap a group."""
        group_start = 0
        for group, addresses in zip(self.spec.groups, self._ranges, strict=True):
            size = self.spec.granule_tokens * group.token_bytes
            start = time.perf_counter()
            addresses.map(
                (slot * self._slot_granules + position) * size, count * size, self._fd, group_start + granule * size
            )
            self.stats.mapped(time.perf_counter() - start)
            group_start += self.spec.num_granules * size

    def _hide(self, slot: int, keep: int) -> None:
        """Make touching what a slot shows from granule `keep` on a fault again.

        That is a guard against bugs, not what frees memory: should the system refuse, which it does when the process
        has used up its mappings, the old pages stay visible until the slot's next granules replace them.
        """
        for group, addresses in zip(self.spec.groups, self._ranges, strict=True):
            size = self.spec.granule_tokens * group.token_bytes
            with contextlib.suppress(OSError):
                addresses.unmap((slot * self._slot_granules + keep) * size, (self._slot_granules - keep) * size)
            self.stats.unmaps += 1
        self._pieces[slot] = self._table.pieces(slot, keep)
