"""What the scheduler sees of KV memory: which granules every slot shows, needs and shares, and the operations that make
it true. Numbers only, memory is never touched."""

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bladellm_runtime.kv.granules import GranulePool, Unit
from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.prompt_cache import TOKEN_BYTES, Match, Node, PromptCache
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.kv.swap_space import SwapSpace

COPY_TOKENS = 4
"""Fewer cached tokens than this are computed again: cheaper than launching copies in every layer."""
SPILL_GRANULES, SPILL_SEARCH = 16, 8
"""Granules copied to the host by one plan at most, and units looked at to find them."""
TIGHT_SHARE = 8
"""Cached units are copied to the host, and nothing is mapped ahead, when less than one granule in so many is free."""


@dataclass(slots=True)
class Held:
    """A unit of a live slot. `node` is set when the prompt cache owns it and this slot is one of its users."""

    unit: Unit
    node: Node | None = None


@dataclass(slots=True)
class Slot:
    """One slot: what it shows, and the sequence it holds, if it is live.

    shown: the granule each position shows, stale beyond what is held, and `ages` the age its block had then (`Blocks`).
    held: the sequence's units in order, `granules` in all; needed: those the sequence needs, the rest is mapped ahead.
    node: the deepest node of the prompt cache on the sequence's path, `indexed` the units up to it; `broken` when the
    next unit has a twin in the cache, so that the path goes on only after the sequence has ended. made: nodes that this
    sequence added.
    """

    shown: list[int] = field(default_factory=list)
    ages: list[int] = field(default_factory=list)
    live: bool = False
    key: str = ""
    held: list[Held] = field(default_factory=list)
    granules: int = 0
    needed: int = 0
    node: Node | None = None
    indexed: int = 0
    broken: bool = False
    made: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Admission:
    """A slot, and how many of the sequence's first tokens are in it already."""

    slot: int
    cached: int


class KvAccounting:
    """Granules of every slot, counted exactly.

    A granule is free, or used by live slots, or idle: kept by the prompt cache alone, or mapped ahead of need. Idle
    ones go to whoever needs them: always free + used + idle == spec.num_granules, and `available()` is free + idle.

    A slot that its sequence has left goes on showing what it showed: where it gets the same granule again at the same
    position nothing has to be mapped. With `sticky=False`, for arenas where that is in the way, it shows nothing then.
    With `shares=False`, for arenas where a granule can be shown by one slot only, there is no prompt cache either.
    """

    def __init__(self, spec: KvSpec, *, shares: bool = True, sticky: bool = True, prompt_cache: bool = True) -> None:
        self.spec = spec
        self.pool = GranulePool(spec.num_granules, spec.block_granules)
        self.swap = SwapSpace(spec.host_granules)
        self.cache = PromptCache(spec.granule_tokens, self.pool, self.swap)
        self._shares = shares
        self._sticky = sticky and shares
        self._caching = shares and prompt_cache
        self._slots = [Slot() for _ in range(spec.num_slots)]
        # Idle slots, the one idle longest first: a dict as an ordered set.
        self._idle_slots = dict.fromkeys(range(spec.num_slots))
        self._ages = [0] * -(-spec.num_granules // spec.block_granules)
        # Slots that hold a granule ahead of need: a dict as an ordered set.
        self._ahead: dict[int, None] = {}
        self._plan = MemoryPlan()
        self._plans = 1
        self._moving: deque[tuple[int, Node]] = deque()

    @property
    def used(self) -> int:
        """Granules that live slots need, or moves in flight read."""
        return self.spec.num_granules - self.available()

    @property
    def live(self) -> int:
        """Slots that sequences hold."""
        return self.spec.num_slots - len(self._idle_slots)

    @property
    def moving(self) -> int:
        """Granules that moves in flight read; some of them are available again afterwards."""
        return sum(node.count for _, node in self._moving)

    def available(self) -> int:
        """Granules that can still be given out: free, cached by nobody's request, or mapped ahead."""
        return self.pool.free + self.cache.idle + len(self._ahead)

    def needed(self, slot: int) -> int:
        """Granules the sequence in a slot needs, shared ones included."""
        return self._slots[slot].needed

    def admit(
        self, tokens: Sequence[int], room: int, headroom: int, key: str = "", read: bool = True
    ) -> Admission | None:
        """Make a slot live for a sequence whose known tokens are `tokens`, with room for `room` tokens.

        It shows what the prompt cache has of them under `key`, all but the last token at most, unless `read` is off.
        None, with nothing changed, when no slot is idle or fewer than `headroom` granules would stay available.
        """
        if not self._idle_slots:
            return None
        match = self._match(tokens, room, headroom, key, read)
        if match is None:
            return None
        number = self._choose_slot(match)
        slot = self._slots[number]
        del self._idle_slots[number]
        slot.live, slot.key = True, key
        self._show_match(number, slot, match)
        if not self.grow(number, room):
            raise RuntimeError(f"slot {number} cannot hold {room} tokens although the KV accounting has room for them")
        self._copy_match(slot, match)
        return Admission(number, match.cached)

    def grow(self, number: int, tokens: int) -> bool:
        """Make a live slot hold at least `tokens` tokens. False, with nothing changed, if there is not enough."""
        slot = self._live(number)
        granules = self.spec.granules(tokens)
        if granules <= slot.needed:
            return True
        if tokens > self.spec.max_tokens or granules - slot.needed > self.available():
            return False
        self._ahead.pop(number, None)
        slot.needed = granules
        self._extend(number, slot, granules, self._plan.views)
        return True

    def map_ahead(self, number: int, tokens: int) -> None:
        """Let a live slot hold one granule more than it needs once `tokens` tokens have half filled its last one, if
        plenty are free. The granule stays available to others."""
        slot = self._live(number)
        size = self.spec.granule_tokens
        plenty = self._sticky and self.pool.free * TIGHT_SHARE > self.spec.num_granules
        room = (slot.needed + 1) * size
        if plenty and slot.granules == slot.needed and room <= self.spec.max_tokens and 2 * (room - tokens) <= 3 * size:
            self._extend(number, slot, slot.needed + 1, self._plan.ahead)
            self._ahead[number] = None

    def remember(self, number: int, tokens: Sequence[int], written: int) -> None:
        """Put the full units among a live slot's first `written` tokens into the prompt cache. The next plan's step, or
        an earlier one, writes them."""
        slot = self._live(number)
        if not self._caching or slot.broken:
            return
        end = self._position(slot, slot.indexed)
        while slot.indexed < len(slot.held) and not slot.broken:
            held = slot.held[slot.indexed]
            start, end = end, end + held.unit.count * self.spec.granule_tokens
            if end > written:
                break
            packed = pack(tokens[start:end])
            node, taken = self.cache.insert(slot.key, slot.node, packed, held.unit, born=self._plans)
            if taken:
                self.cache.use(node)
                held.node = node
                slot.node = node
                slot.made.append(node)
                slot.indexed += 1
            slot.broken = not taken

    def release_slot(self, number: int, tokens: Sequence[int] = (), written: int = 0, valid: bool = True) -> None:
        """Make a live slot idle; nothing in flight may touch its memory any more.

        The KV of its first `written` tokens, which are `tokens`, stays in the prompt cache; none of what this sequence
        computed does unless it is `valid`.
        """
        slot = self._live(number)
        self._ahead.pop(number, None)
        if self._caching and valid:
            self._keep(slot, tokens, written)
        else:
            self._give_up(slot, valid)
        if not self._sticky and slot.shown:
            self._plan.views.append(Hide(number, 0))
            slot.shown, slot.ages = [], []
        if slot.node is not None:
            slot.node.slot = number
        self._slots[number] = Slot(slot.shown, slot.ages)
        self._idle_slots[number] = None

    def drain_ops(self) -> MemoryPlan:
        """The operations since the last call, for the next step; it must be run and later be `complete`d."""
        if self.swap.num_places and self.pool.free * TIGHT_SHARE < self.spec.num_granules:
            self._spill()
        plan, self._plan = self._plan, MemoryPlan()
        self._plans += 1
        return plan

    def complete(self, plans: int) -> None:
        """The first `plans` drained plans have been carried out."""
        while self._moving and self._moving[0][0] <= plans:
            _, node = self._moving.popleft()
            self.cache.release(node, touch=False)

    def reset_prompt_cache(self) -> None:
        """Forget every cached prompt that no live slot uses. Only while no plan is in flight."""
        self.cache.reset()

    def check(self) -> None:
        """Raise `RuntimeError` if a count is wrong. For tests and idle moments: visits every slot."""
        self.pool.check()
        nodes = [node for node in self.cache.nodes() if node.unit is not None]
        live = [slot for slot in self._slots if slot.live]
        private = [held.unit.count for slot in live for held in slot.held if held.node is None]
        users: dict[Node, int] = {}
        for node in [held.node for slot in live for held in slot.held] + [node for _, node in self._moving]:
            if node is not None:
                users[node] = users.get(node, 0) + 1
        problems = {
            "granules are lost or invented": self.pool.free + sum(node.count for node in nodes) + sum(private)
            != self.spec.num_granules,
            "users are miscounted": any(node.users != users.get(node, 0) for node in self.cache.nodes()),
            "idle is miscounted": self.cache.idle != sum(node.count for node in nodes if node.users == 0),
            "a used node has an unused parent": any(
                node.users and node.parent and node.parent.parent and not node.parent.users for node in nodes
            ),
            "shared is miscounted": self.cache.shared != sum((n.users - 1) * n.count for n in nodes if n.users),
            "ahead is miscounted": len(self._ahead) != sum(slot.granules - slot.needed for slot in live),
            "a slot is miscounted": any(
                slot.granules != sum(held.unit.count for held in slot.held) or slot.needed > slot.granules
                for slot in self._slots
            ),
            "a slot does not show what it holds": any(
                slot.shown[: slot.granules] != [g for held in slot.held for g in held.unit.granules] for slot in live
            ),
            "an idle slot is live": any(self._slots[number].live for number in self._idle_slots),
            "places are lost": self.swap.used != sum(len(n.places) for n in self.cache.nodes() if n.places),
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise RuntimeError("KV accounting: " + "; ".join(found))

    def _match(self, tokens: Sequence[int], room: int, headroom: int, key: str, read: bool) -> Match | None:
        """What of a sequence can be shown and copied; None when there is no room for the rest of it."""
        match = Match()
        if self._caching and read and len(tokens) > 1:
            match = self.cache.match(key, pack(tokens), len(tokens) - 1, copyable=self._plans)
        source = match.source
        if source is not None and (source.unit is None or match.copied < COPY_TOKENS):
            match.source, match.copied = None, 0
        if match.source is not None and not self._has_room(match, room, headroom):
            match.source, match.copied = None, 0
        return match if self._has_room(match, room, headroom) else None

    def _has_room(self, match: Match, room: int, headroom: int) -> bool:
        """Whether a sequence with this match can enter: what it needs anew, and what it keeps from being evicted."""
        new = self.spec.granules(room) - sum(node.count for node in match.path if node.unit is not None)
        kept = [node for node in (*match.path, match.source) if node is not None and node.unit is not None]
        pinned = sum(node.count for node in kept if node.users == 0)
        return new + pinned + headroom <= self.available()

    def _choose_slot(self, match: Match) -> int:
        """The idle slot that still shows the cached beginning if there is one. Else the one idle longest, whose own
        sequence will be evicted first; without a prompt cache the latest, which shows granules that are free."""
        if match.path and match.path[-1].slot in self._idle_slots:
            return match.path[-1].slot
        order: Iterator[int] = iter(self._idle_slots) if self._caching else reversed(self._idle_slots)
        return next(order)

    def _show_match(self, number: int, slot: Slot, match: Match) -> None:
        """Hold the units of a match, those on the host brought back; shortens it where no block is left for one."""
        resident = [node for node in match.path if node.unit is not None]
        for node in (*resident, *([match.source] if match.source else [])):
            self.cache.use(node)
        if match.source is not None:
            self._moving.append((self._plans, match.source))
        for index, node in enumerate(match.path):
            if node.unit is None and not self._bring_back(slot, node):
                match.length = self._position(slot, index)
                match.source, match.copied = None, 0
                del match.path[index:]
                break
            if node.unit is not None:
                self._hold(number, slot, Held(node.unit, node), self._plan.views)
        slot.indexed, slot.needed = len(slot.held), slot.granules
        slot.node = match.path[-1] if match.path else None

    def _bring_back(self, slot: Slot, node: Node) -> bool:
        """Copy a node on the host to a unit of the pool and use it; False when no block is free for it."""
        unit = self._take(slot, node.count)
        if unit.count != node.count:
            self.pool.give(unit)
            return False
        places = self.cache.land(node, unit)
        self.cache.use(node)
        self._plan.moves += [SwapIn(place, granule) for place, granule in zip(places, unit.granules, strict=True)]
        return True

    def _copy_match(self, slot: Slot, match: Match) -> None:
        """Copy the part of a unit that a match has beyond its whole units, to granules of the sequence's own."""
        if match.source is None or match.source.unit is None:
            return
        size = self.spec.granule_tokens
        first = match.length // size
        for index in range(self.spec.granules(match.copied)):
            tokens = min(size, match.copied - index * size)
            source = match.source.unit.first + index
            self._plan.moves.append(Copy(source, slot.shown[first + index], tokens))

    def _extend(self, number: int, slot: Slot, granules: int, views: "list[Show] | list[Show | Hide]") -> None:
        """Take units until a slot holds `granules` granules. There must be enough."""
        while slot.granules < granules:
            self._hold(number, slot, Held(self._take(slot, granules - slot.granules)), views)

    def _take(self, slot: Slot, missing: int) -> Unit:
        """A unit of at most `missing` granules for the slot's next position: what it shows there already if that is
        free, a whole block where one fits and is free, else a granule."""
        size, position = self.spec.block_granules, slot.granules
        wanted = slot.shown[position] if position < len(slot.shown) and self._fresh(slot, position) else None
        self._make_free(min(size, missing) if missing >= size else 1)
        if 1 < size <= missing:
            whole = wanted is not None and self._is_whole(wanted) and wanted % size == 0
            block = self.pool.take_block(wanted if whole else None)
            if block is not None:
                self._set_class(block.first, whole=True)
                return block
        single = wanted if wanted is not None and not self._is_whole(wanted) else None
        unit = self.pool.take(single, after=slot.held[-1].unit.first if slot.held else None)
        self._set_class(unit.first, whole=False)
        return unit

    def _make_free(self, granules: int) -> None:
        """Evict cached units, then take back what is mapped ahead, until so many granules are free or none is left."""
        while self.pool.free < granules and self.cache.idle:
            self.cache.evict()
        while self.pool.free < granules and self._ahead:
            number, _ = self._ahead.popitem()
            slot = self._slots[number]
            unit = slot.held.pop().unit
            slot.granules -= unit.count
            self.pool.give(unit)
            self._plan.ahead = [show for show in self._plan.ahead if show.slot != number]
            del slot.shown[slot.granules :], slot.ages[slot.granules :]

    def _hold(self, number: int, slot: Slot, held: Held, views: "list[Show] | list[Show | Hide]") -> None:
        """Append a unit to what a slot holds, and show it where that is not shown already."""
        unit, position = held.unit, slot.granules
        age = self._ages[unit.first // self.spec.block_granules]
        slot.held.append(held)
        slot.granules += unit.count
        end = position + unit.count
        if slot.shown[position:end] == unit.granules and slot.ages[position:end] == [age] * unit.count:
            return
        slot.shown[position:end] = unit.granules
        slot.ages[position:end] = [age] * unit.count
        whole = unit.count > 1
        last = views[-1] if views else None
        if (
            not whole
            and isinstance(last, Show)
            and not last.whole
            and (last.slot, last.position + len(last.granules)) == (number, position)
        ):
            last.granules.append(unit.first)
        else:
            views.append(Show(number, position, unit.granules, whole))

    def _keep(self, slot: Slot, tokens: Sequence[int], written: int) -> None:
        """Leave what an ended sequence has written to the prompt cache, its last granule as a tail."""
        end = self._position(slot, slot.indexed)
        for held in slot.held[slot.indexed :]:
            start, end = end, end + held.unit.count * self.spec.granule_tokens
            known = min(end, written)
            if known - start < COPY_TOKENS:
                self.pool.give(held.unit)
                continue
            packed = pack(tokens[start:known])
            node, taken = self.cache.insert(slot.key, slot.node, packed, held.unit, born=0, tail=known < end)
            if not taken:
                self.pool.give(held.unit)
            if known == end:
                slot.node = node
        self._release(slot.held[: slot.indexed])

    def _give_up(self, slot: Slot, valid: bool) -> None:
        """Keep nothing of a sequence beyond what was cached of it before it ended, and that only if it is valid."""
        for held in slot.held[slot.indexed :]:
            self.pool.give(held.unit)
        self._release(slot.held[: slot.indexed])
        for node in reversed([] if valid else slot.made):
            self.cache.forget(node)
            slot.node = None

    def _release(self, held: list[Held]) -> None:
        for each in reversed(held):
            if each.node is not None:
                self.cache.release(each.node)

    def _spill(self) -> None:
        """Copy units that will be evicted soon to the host, so that their contents survive."""
        granules = 0
        while granules < SPILL_GRANULES:
            spill = self.cache.next_spill(self._plans, SPILL_SEARCH)
            if spill is None:
                return
            chain, places = spill
            granules += chain[0].count
            self._moving += [(self._plans, node) for node in chain]
            if (unit := chain[0].unit) is not None:
                moves = zip(unit.granules, places, strict=True)
                self._plan.moves += [SwapOut(granule, place) for granule, place in moves]

    def _position(self, slot: Slot, units: int) -> int:
        """Tokens before a slot's unit number `units`."""
        return sum(held.unit.count for held in slot.held[:units]) * self.spec.granule_tokens

    def _fresh(self, slot: Slot, position: int) -> bool:
        """Whether a position still shows what it showed: its block has not changed between whole and split since."""
        return slot.ages[position] == self._ages[slot.shown[position] // self.spec.block_granules]

    def _is_whole(self, granule: int) -> bool:
        """Blocks are whole at first, and at every even age."""
        return self.spec.block_granules > 1 and self._ages[granule // self.spec.block_granules] % 2 == 0

    def _set_class(self, granule: int, whole: bool) -> None:
        """Note that a block is used whole, or granule by granule; that ends all views of it if it changes."""
        if self.spec.block_granules > 1 and self._is_whole(granule) != whole:
            self._ages[granule // self.spec.block_granules] += 1

    def _live(self, number: int) -> Slot:
        slot = self._slots[number]
        if not slot.live:
            raise ValueError(f"slot {number} is not live")
        return slot


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as int32, to compare and to look up."""
    packed = array("i", tokens)
    if packed.itemsize != TOKEN_BYTES:
        raise RuntimeError("int is not 32 bits wide here")
    return packed.tobytes()
