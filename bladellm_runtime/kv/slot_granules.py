"""`SlotGranules`: gives units of the pool to slots, one after the other, and notes which views that takes."""

from collections.abc import Collection
from dataclasses import dataclass, field

from bladellm_runtime.kv.granules import GranulePool, Unit
from bladellm_runtime.kv.operations import Hide, MemoryPlan, Show
from bladellm_runtime.kv.prompt_cache import PromptCache
from bladellm_runtime.kv.prompt_tree import Node
from bladellm_runtime.kv.slot_views import BlockClasses, SlotView

TIGHT_SHARE = 8
"""Memory is tight when less than one granule in so many is free."""
SPARE_GRANULES = 64
"""Free granules among which those are found that a slot is prepared with."""


@dataclass(slots=True)
class Held:
    """A unit of a live slot. `node` is set when the prompt cache owns it and this slot is one of its users."""

    unit: Unit
    node: Node | None = None


@dataclass(slots=True)
class Slot:
    """One slot: its view, and the sequence it holds, if it is live.

    held: the sequence's units in order, `granules` in all; needed: those the sequence needs, the rest is mapped ahead.
    node: the deepest node of the prompt cache on the sequence's path; `indexed` the units up to it, with `tokens`
    tokens; `broken` when the next unit has a twin in the cache, so that the path goes on only after the sequence has
    ended.
    """

    number: int
    view: SlotView
    live: bool = False
    key: str = ""
    held: list[Held] = field(default_factory=list)
    granules: int = 0
    needed: int = 0
    node: Node | None = None
    indexed: int = 0
    tokens: int = 0
    broken: bool = False
    left: Node | None = None
    """The node with the last tokens of the sequence that left the slot."""


class SlotGranules:
    """The slots of an arena over the pool, and the plan of memory operations that the next step starts with.

    What is free goes first, then what the prompt cache alone keeps, then what is mapped ahead of need.
    """

    def __init__(self, num_slots: int, pool: GranulePool, cache: PromptCache, split_blocks: int = 0) -> None:
        self._pool = pool
        self._cache = cache
        self._classes = BlockClasses(pool.num_granules, pool.block_granules, split_blocks)
        self.slots = [Slot(number, SlotView(self._classes)) for number in range(num_slots)]
        self.plan = MemoryPlan()
        # Slots that hold a granule ahead of need: a dict as an ordered set.
        self._ahead: dict[int, None] = {}

    @property
    def ahead(self) -> int:
        """Granules mapped ahead of need."""
        return len(self._ahead)

    @property
    def tight(self) -> bool:
        return self._pool.free * TIGHT_SHARE <= self._pool.num_granules

    def extend(self, slot: Slot, granules: int) -> None:
        """Make a slot need `granules` granules. There must be enough."""
        if slot.number in self._ahead:
            self._need_ahead(slot)
        slot.needed = granules
        while slot.granules < granules:
            self.hold(slot, Held(self.take(slot, granules - slot.granules)), self.plan.views)

    def extend_ahead(self, slot: Slot) -> None:
        """Let a slot hold a granule more than it needs. One must be free."""
        self.hold(slot, Held(self.take(slot, 1)), self.plan.ahead)
        self._ahead[slot.number] = None

    def take(self, slot: Slot, missing: int) -> Unit:
        """A unit of at most `missing` granules for the slot's next position: what it shows there already if that is
        free, a whole block where one fits and is free, else a granule."""
        size, wanted = self._pool.block_granules, slot.view.at(slot.granules)
        whole = wanted is not None and self._classes.is_whole(wanted)
        unit = None
        self._make_free(size if missing >= size else 1)
        if 1 < size <= missing:
            self._make_whole()
            unit = self._pool.take_block(wanted if whole and wanted is not None and wanted % size == 0 else None)
        if unit is None:
            after = slot.held[-1].unit.first if slot.held else None
            unit = self._pool.take(None if whole else wanted, after)
        self._classes.use(unit)
        return unit

    def hold(self, slot: Slot, held: Held, views: "list[Show] | list[Show | Hide]") -> None:
        """Append a unit to what a slot holds, and show it where that is not shown already."""
        position = slot.granules
        slot.held.append(held)
        slot.granules += held.unit.count
        _show(slot, position, held.unit, views)

    def prepare(self, slot: Slot, positions: range, reserved: Collection[int] = ()) -> None:
        """Have an idle slot show free granules at these positions, if it shows something before them, and not in one
        with it: those that it shows already, or others, but no `reserved` ones. The next sequence there takes them as
        they are; nothing is held until then."""
        if positions.start > len(slot.view.granules) or slot.view.cuts(positions.start):
            return
        kept = {*slot.view.granules[positions.start : positions.stop], *reserved}
        used = set(reserved)
        spare = (one for one in self._pool.spare(SPARE_GRANULES) if one not in kept and self._is_single(one))
        for position in positions:
            shown = slot.view.at(position)
            if shown is not None and shown not in used and self._is_single(shown) and self._pool.is_free(shown):
                # It may be in view at another position, too.
                used.add(shown)
                continue
            granule = next(spare, None)
            if granule is None:
                return
            _show(slot, position, Unit(granule, 1), self.plan.ahead)

    def _is_single(self, granule: int) -> bool:
        """Whether a granule can be shown by itself as its block is."""
        return not self._classes.is_whole(granule)

    def clear(self, slot: Slot, hide: bool) -> None:
        """Make a slot idle; its units are somebody else's matter. `hide`: it must not show anything any more."""
        if self._ahead.pop(slot.number, 0) is None:
            self._cancel_ahead(slot)
        if hide and slot.view.granules:
            self.plan.views.append(Hide(slot.number, 0))
            slot.view.cut(0)
        self.slots[slot.number] = Slot(slot.number, slot.view, left=slot.left)

    def _need_ahead(self, slot: Slot) -> None:
        """The next step needs what was mapped ahead: so it does the view, if that is still to come."""
        del self._ahead[slot.number]
        plan = self.plan
        plan.views += [show for show in plan.ahead if show.slot == slot.number]
        plan.ahead = [show for show in plan.ahead if show.slot != slot.number]

    def _make_free(self, granules: int) -> None:
        """Evict cached units, then take back what is mapped ahead, until so many granules are free or none is left."""
        while self._pool.free < granules and self._cache.idle:
            self._cache.evict()
        while self._pool.free < granules and self._ahead:
            number, _ = self._ahead.popitem()
            slot = self.slots[number]
            unit = slot.held.pop().unit
            slot.granules -= unit.count
            self._pool.give(unit)
            self._cancel_ahead(slot)

    def _make_whole(self) -> None:
        """Evict a block's worth of cached units, or less, until a whole block is free: else what is free in pieces
        goes to long sequences, and ever fewer blocks stay whole."""
        budget = self._pool.block_granules
        while not self._pool.free_blocks and self._cache.idle and budget > 0:
            before = self._pool.free
            self._cache.evict()
            budget -= self._pool.free - before

    def _cancel_ahead(self, slot: Slot) -> None:
        """Leave out the view of what was mapped ahead, if that is still to come: nothing may count on it."""
        others = [show for show in self.plan.ahead if show.slot != slot.number]
        if len(others) < len(self.plan.ahead):
            self.plan.ahead = others
            slot.view.cut(slot.needed)


def _show(slot: Slot, position: int, unit: Unit, views: "list[Show] | list[Show | Hide]") -> None:
    """Show a unit where that is not shown already."""
    if not slot.view.show(position, unit):
        return
    last = views[-1] if views else None
    if unit.count == 1 and isinstance(last, Show) and not last.whole and _follows(last, slot.number, position):
        last.granules.append(unit.first)
    else:
        views.append(Show(slot.number, position, unit.granules, unit.count > 1))


def _follows(show: Show, slot: int, position: int) -> bool:
    return show.slot == slot and show.position + len(show.granules) == position
