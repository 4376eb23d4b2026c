"""`SlotPreparation`: has the slots that are next show free granules, so that who comes need not wait for them."""

from collections import deque
from itertools import chain

from bladellm_runtime.kv.granules import GranulePool
from bladellm_runtime.kv.prompt_cache import PromptCache
from bladellm_runtime.kv.slot_granules import SlotGranules

PREPARED_SLOTS = 2
"""Slots that are prepared, for sequences that come together."""
PREPARED_GRANULES = 32
"""Most granules shown ahead of the sequence that will need them."""
RECENT = 8
"""Sequences let in last: the next one will need no more granules than one of them, mostly."""
KEPT_SHARE = 32
"""One granule in so many, at most, is taken from the prompt cache before somebody needs it."""


class SlotPreparation:
    """What a slot is prepared with is nobody's: whoever needs it first has it. The next sequence in the slot takes what
    is left as it is.

    Where the prompt cache has all the memory, some of it is freed for that: first what the next slots show themselves,
    which was used longest ago, more or less, and is in view already.

    Whole blocks, mapped by one call each, are left to the sequences.
    """

    def __init__(self, pool: GranulePool, cache: PromptCache, granules: SlotGranules, longest: int) -> None:
        """longest: granules that a slot shows at most."""
        self._pool = pool
        self._cache = cache
        self._granules = granules
        self._longest = longest
        self._begin = 0
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._seen: tuple[list[int], range, int] = ([], range(0), 0)
        """The slots that were next at the last plan, the positions to prepare, and how many granules were free then."""
        self._prepared: dict[int, list[int]] = {}
        """What each prepared slot shows there."""
        self._least = 0
        """With fewer free ones more are freed."""

    def note(self, own: range) -> None:
        """A sequence got granules of its own for these positions."""
        block = self._pool.block_granules
        self._begin = own.start
        self._recent.append(len(own) if block == 1 or len(own) < block else 0)

    def prepare(self, numbers: list[int]) -> None:
        """Prepare the slots that are next, which are idle."""
        length = min(max(self._recent, default=0), PREPARED_GRANULES, self._longest - self._begin)
        positions = range(self._begin, self._begin + length)
        if (numbers, positions, self._pool.free) == self._seen:
            return
        if positions != self._seen[1]:
            self._prepared.clear()
        missing = [number for number in numbers if not self._is_prepared(number)]
        if missing or self._pool.free < self._least:
            most = self._pool.num_granules // KEPT_SHARE
            self._least = min(2 * length, most)
            self._keep_free(missing, min(2 * length * PREPARED_SLOTS, most))
            self._prepared = {number: self._prepared[number] for number in numbers if number not in missing}
            for number in missing if self._pool.free >= 2 * length else ():
                self._prepare(number, positions)
        self._seen = numbers, positions, self._pool.free

    def _is_prepared(self, number: int) -> bool:
        """Whether a slot was, and nobody has taken what it was prepared with."""
        return number in self._prepared and all(map(self._pool.is_free, self._prepared[number]))

    def _prepare(self, number: int, positions: range) -> None:
        slot = self._granules.slots[number]
        self._granules.prepare(slot, positions, set(chain.from_iterable(self._prepared.values())))
        shown = slot.view.granules[positions.start : positions.stop]
        if len(shown) == len(positions):
            self._prepared[number] = shown

    def _keep_free(self, numbers: list[int], wanted: int) -> None:
        """Have so many granules free, as far as the prompt cache can spare them."""
        for number in numbers:
            left = self._granules.slots[number].left
            if self._pool.free < wanted and left is not None:
                self._cache.evict_branch(left)
        while self._pool.free < wanted and self._cache.idle:
            self._cache.evict()
