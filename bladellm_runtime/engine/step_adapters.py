"""Which adapters the tokens of a step have: from the loads of slots to what a forward pass reads."""

import numpy as np
from bladellm_kernels.lora_tokens import FIELDS, fill_tiles, most_tiles
from numpy.typing import NDArray

from bladellm_runtime.scheduler.plan import SlotLoad, StepPlan
from bladellm_runtime.scheduler.prepared import NO_ADAPTER

Ints = NDArray[np.int64]


class SlotAdapters:
    """The adapter of the request in each slot, as the slot that the adapter is in; on the host."""

    def __init__(self, num_slots: int) -> None:
        self._adapters = np.full(num_slots, NO_ADAPTER, dtype=np.int64)

    def load(self, load: SlotLoad) -> None:
        """A request takes a slot."""
        self._adapters[load.slot] = load.adapter

    def of(self, plan: StepPlan) -> Ints | None:
        """Of a plan's rows, -1 for none; None where no row has one."""
        adapters = self._adapters[plan.slots]
        return adapters if adapters.max(initial=NO_ADAPTER) != NO_ADAPTER else None


def tiles_of(adapters: Ints) -> tuple[Ints, Ints]:
    """Order and tiles of tokens with these adapters, as many as they need at most."""
    order = np.empty_like(adapters)
    tiles = np.empty((most_tiles(len(adapters), int(adapters.max()) + 1), FIELDS), dtype=np.int64)
    fill_tiles(adapters, order, tiles)
    return order, tiles
