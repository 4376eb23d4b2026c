"""What a step plan says about memory: which granules slots show, and which contents move. Numbers only, no torch.

A granule is named by its number in the pool, 0 to `num_granules - 1`.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Show(NamedTuple):
    """Make a slot's granules from `position` on show `granules`, replacing what those positions showed.

    A slot's positions are filled from 0 without gaps. `whole`: the granules are one whole block of the pool, first to
    last, taken as such: arenas may map it with one call a layer group. A block taken whole is only ever shown whole.
    """

    slot: int
    position: int
    granules: list[int]
    whole: bool = False


class Hide(NamedTuple):
    """Make a slot show its first `keep` granules only."""

    slot: int
    keep: int


class Copy(NamedTuple):
    """Copy the first `tokens` tokens of granule `source`, in every layer and with their scales, to granule `target`."""

    source: int
    target: int
    tokens: int


class SwapOut(NamedTuple):
    """Copy a granule to place `host` of the swap space in host memory."""

    granule: int
    host: int


class SwapIn(NamedTuple):
    """Copy place `host` of the swap space to a granule."""

    host: int
    granule: int


class Rows(NamedTuple):
    """What a step's kernels touch: row i reads what slot `slots[i]` holds before position `starts[i]`, and reads and
    writes the `query_lens[i]` tokens from there on; int64."""

    slots: Ints
    starts: Ints
    query_lens: Ints

    def ends(self, num_slots: int) -> Ints:
        """How many of its first tokens the step enters, by slot."""
        entered = np.zeros(num_slots, np.int64)
        entered[self.slots] = self.starts + self.query_lens
        return entered


@dataclass(slots=True)
class MemoryPlan:
    """Memory operations of a step, in this order: `views` before the step's kernels, as far as those enter them, then
    `moves` in stream order.

    `ahead` are views that no row of this step needs: an arena may carry them out later, but before a step whose rows
    do, and before whatever comes after them about the same slot or block. Where they take a block otherwise than
    before, moves of its granules come after that, and so do views in place of the block.
    """

    views: list[Show | Hide] = field(default_factory=list)
    moves: list[Copy | SwapOut | SwapIn] = field(default_factory=list)
    ahead: list[Show] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.views or self.moves or self.ahead)
