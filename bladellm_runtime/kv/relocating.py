"""`RelocatingArena`: KV memory for any device; a slot's granules lie next to each other in one tensor a layer.

What virtual memory does with mappings this does with copies on the device: a slot that outgrows its place moves.
"""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from bladellm_runtime.kv.arena import Ints, KvShape
from bladellm_runtime.kv.extents import ExtentMap, Move
from bladellm_runtime.kv.granule_arena import GranuleArena
from bladellm_runtime.kv.operations import Copy, Show, SwapIn, SwapOut
from bladellm_runtime.kv.paged import layer_tensors
from bladellm_runtime.kv.spec import KvSpec

SCRATCH_BYTES = 16 << 20


class RelocatingArena(GranuleArena):
    """One tensor a layer, [num_granules * granule_tokens, 2, Hk, W], cut into extents of granules.

    Granule numbers only say whose scales are whose: what a granule contains is in the extent of the slot that shows
    it, and a granule that no slot shows contains nothing. Copies are ordered with the work of the current stream and
    never wait for it; after `submit`, `base_row` of any slot may have changed.
    """

    shares: ClassVar[bool] = False

    def __init__(self, spec: KvSpec, shape: KvShape, device: torch.device) -> None:
        super().__init__(spec, shape, device)
        self._payloads = layer_tensors(spec, shape, device)
        rows = self._payloads[0]
        scratch_rows = min(len(rows), max(1, SCRATCH_BYTES // shape.payload_bytes))
        self._scratch = torch.empty((scratch_rows, *rows.shape[1:]), dtype=rows.dtype, device=device)
        self._extents = ExtentMap(spec.num_granules)
        self._places: dict[int, tuple[int, int]] = {}
        """Slot and position of every granule that is shown."""
        self._present(self._payloads, [rows.unflatten(0, (-1, spec.granule_tokens)) for rows in self._payloads])

    def move(self, moves: Sequence[Copy | SwapOut | SwapIn]) -> None:
        self._open().move(moves, self._place)

    def base_row(self, slot: int) -> int:
        return self._extents.start(slot) * self.spec.granule_tokens

    def base_rows(self, slots: Ints) -> Ints:
        starts = [self._extents.start(slot) for slot in slots.tolist()]
        return np.array(starts, dtype=np.int64) * self.spec.granule_tokens

    def close(self) -> None:
        super().close()
        self._payloads.clear()
        self._scratch = torch.empty(0)

    def _show(self, view: Show) -> None:
        slot, end = view.slot, view.position + len(view.granules)
        replaced = range(view.position, end)
        for position, granule in zip(replaced, view.granules, strict=True):
            place = self._places.get(granule, (slot, position))
            if place != (slot, position):
                raise ValueError(f"granule {granule} is shown already, by slot {place[0]} at {place[1]}")
        for move in self._extents.grow(slot, end):
            self._relocate(move)
            self.stats.relocated_granules += move.count
        for granule in self._table.granules(slot)[view.position : end]:
            del self._places[granule]
        self._places.update(zip(view.granules, ((slot, position) for position in replaced), strict=True))

    def _hide(self, slot: int, keep: int) -> None:
        for granule in self._table.granules(slot)[keep:]:
            self._places.pop(granule, None)
        self._extents.shrink(slot, keep)

    def _place(self, granule: int) -> int:
        """Where in the tensors a granule is now."""
        if granule not in self._places:
            raise ValueError(f"granule {granule} is shown by no slot and has no contents to move")
        slot, position = self._places[granule]
        return self._extents.start(slot) + position

    def _relocate(self, move: Move) -> None:
        tokens = self.spec.granule_tokens
        for rows in self._payloads:
            copy_rows(rows, move.source * tokens, move.target * tokens, move.count * tokens, self._scratch)


def copy_rows(rows: torch.Tensor, source: int, target: int, count: int, scratch: torch.Tensor) -> None:
    """Copy `count` rows of a tensor within it, the two stretches possibly overlapping.

    Goes in blocks from the end that is overwritten first: blocks as long as the distance, which cannot overlap
    themselves, or through `scratch`, same shape a row, where it holds more than that.
    """
    distance = abs(target - source)
    if distance == 0:
        return
    direct = distance >= min(count, len(scratch))
    block = min(count, distance if direct else len(scratch))
    firsts = range(0, count, block)
    for first in firsts if target < source else reversed(firsts):
        size = min(block, count - first)
        part = rows[source + first : source + first + size]
        if not direct:
            part = scratch[:size].copy_(part)
        rows[target + first : target + first + size].copy_(part)
