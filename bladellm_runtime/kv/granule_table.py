"""`GranuleTable`: which granules each slot shows, on the host and, where kernels read it, on the device."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from bladellm_runtime.kv.operations import Hide, Show
from bladellm_runtime.kv.spec import KvSpec

NOTHING = -1


class GranuleTable:
    """`rows`: int32 [slots, granules of the longest sequence], -1 where a slot shows nothing.

    `device_rows` is the same on a device, one step behind: `upload` queues the entries that changed since its last
    call on the current stream, so that kernels queued before still find what they were planned with.
    """

    def __init__(self, spec: KvSpec, device: torch.device | None) -> None:
        """With `device` None there is no copy."""
        self._spec = spec
        self._lengths = [0] * spec.num_slots
        self.rows = np.full((spec.num_slots, spec.max_tokens // spec.granule_tokens), NOTHING, np.int32)
        self.device_rows = None if device is None else torch.from_numpy(self.rows).clone().to(device)
        self._changed: list[npt.NDArray[np.int64]] = []

    def length(self, slot: int) -> int:
        """How many granules the slot shows."""
        return self._lengths[slot]

    def granules(self, slot: int) -> list[int]:
        """What the slot shows, first to last."""
        shown: list[int] = self.rows[slot, : self._lengths[slot]].tolist()
        return shown

    def at(self, slot: int, position: int) -> int:
        """The granule that the slot shows at a position, or `NOTHING`."""
        return int(self.rows[slot, position])

    def pieces(self, slot: int, end: int, view: Show | None = None) -> int:
        """How many runs of consecutive granules the slot's first `end` granules are, those of `view` in place."""
        row = self.rows[slot, :end]
        if view is not None:
            row = row.copy()
            row[view.position : view.position + len(view.granules)] = view.granules
        return int(np.count_nonzero(np.diff(row) != 1)) + (end > 0)

    def check(self, view: Show | Hide) -> None:
        """Raise `ValueError` for a view outside the arena, with a gap before it, or not of a whole block as it says."""
        most = self.rows.shape[1]
        if isinstance(view, Hide):
            if not (0 <= view.slot < len(self._lengths) and 0 <= view.keep <= most):
                raise ValueError(f"{view} is outside the KV arena")
            return
        granules, count = view.granules, len(view.granules)
        inside = 0 <= view.slot < len(self._lengths) and 0 <= view.position <= most - count and count > 0
        if not inside or min(granules) < 0 or max(granules) >= self._spec.num_granules:
            raise ValueError(f"{view} is outside the KV arena")
        if view.position > self._lengths[view.slot]:
            raise ValueError(f"{view} leaves a gap: the slot shows {self._lengths[view.slot]} granules")
        block = self._spec.block_granules
        if view.whole and (granules[0] % block or granules != list(range(granules[0], granules[0] + block))):
            raise ValueError(f"{view} is not one whole block of {block} granules")

    def show(self, slot: int, position: int, granules: Sequence[int]) -> None:
        """Enter what a `Show` that was checked says."""
        end = position + len(granules)
        self.rows[slot, position:end] = granules
        self._lengths[slot] = max(self._lengths[slot], end)
        self._note(slot, position, end)

    def hide(self, slot: int, keep: int) -> None:
        """Enter what a `Hide` that was checked says."""
        end = self._lengths[slot]
        if keep < end:
            self.rows[slot, keep:end] = NOTHING
            self._lengths[slot] = keep
            self._note(slot, keep, end)

    def upload(self) -> None:
        """Queue the changes for the device."""
        if self.device_rows is None or not self._changed:
            return
        places = np.unique(np.concatenate(self._changed))
        self._changed.clear()
        update = torch.from_numpy(np.stack((places, self.rows.reshape(-1)[places])))
        if self.device_rows.device.type == "cuda":
            update = update.pin_memory().to(self.device_rows.device, non_blocking=True)
        self.device_rows.view(-1).index_copy_(0, update[0], update[1].int())

    def _note(self, slot: int, first: int, end: int) -> None:
        if self.device_rows is not None:
            start = slot * self.rows.shape[1]
            self._changed.append(np.arange(start + first, start + end, dtype=np.int64))


def runs(granules: Sequence[int]) -> list[tuple[int, int, int]]:
    """Stretches of consecutive granules, as (index in the list, first granule, length)."""
    found: list[tuple[int, int, int]] = []
    start = 0
    for i in range(1, len(granules) + 1):
        if i == len(granules) or granules[i] != granules[i - 1] + 1:
            found.append((start, granules[start], i - start))
            start = i
    return found
