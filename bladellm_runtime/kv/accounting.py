"""What the scheduler sees of KV memory: which granules every slot shows, needs and shares, and the operations that make
it true. Numbers only, memory is never touched."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from bladellm_runtime.kv import accounting_check
from bladellm_runtime.kv.granules import GranulePool
from bladellm_runtime.kv.operations import Copy, MemoryPlan, Show, SwapIn, SwapOut
from bladellm_runtime.kv.prompt_cache import PromptCache
from bladellm_runtime.kv.prompt_match import COPY_TOKENS, Match
from bladellm_runtime.kv.prompt_tree import Node, pack
from bladellm_runtime.kv.slot_granules import Held, Slot, SlotGranules
from bladellm_runtime.kv.slot_preparation import PREPARED_SLOTS, SlotPreparation
from bladellm_runtime.kv.spec import KvSpec
from bladellm_runtime.kv.swap_space import SwapSpace

SPILL_GRANULES, SPILL_SEARCH = 16, 32
"""Granules copied to the host by one plan at most, and units looked at to find them."""


class ViewProgress(Protocol):
    """Who makes views beside the steps, and knows how far that is."""

    def is_shown(self, slot: int, granules: int) -> bool:
        """Whether a slot shows its first `granules` granules, of the views that were asked for, or fails to."""


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

    def __init__(
        self,
        spec: KvSpec,
        *,
        shares: bool = True,
        sticky: bool = True,
        prompt_cache: bool = True,
        progress: ViewProgress | None = None,
    ) -> None:
        """progress: knows which views have been made; None where that takes no time."""
        self.spec = spec
        self.pool = GranulePool(spec.num_granules, spec.block_granules)
        self.swap = SwapSpace(spec.host_granules)
        self.cache = PromptCache(spec.granule_tokens, self.pool, self.swap)
        self.granules = SlotGranules(spec.num_slots, self.pool, self.cache, spec.split_blocks)
        self.pinned: deque[tuple[int, Node]] = deque()
        """Nodes that moves in flight read, each with the plan of the move."""
        self.idle_slots: dict[int, None] = dict.fromkeys(range(spec.num_slots))
        """Slots without a sequence, the one idle longest first: a dict as an ordered set."""
        self._sticky = shares and sticky
        self._caching = shares and prompt_cache
        self._progress = progress
        self._plans = 1
        self._preparation = SlotPreparation(self.pool, self.cache, self.granules, spec.granules(spec.max_tokens))
        # Counts what may make room for a sequence, or more of it cached; and who was refused when it stood there.
        self._news = 0
        self._refused: tuple[Sequence[int], int, int, int] = ((), 0, 0, -1)

    @property
    def used(self) -> int:
        """Granules that live slots need, or moves in flight read."""
        return self.spec.num_granules - self.available()

    @property
    def live(self) -> int:
        """Slots that sequences hold."""
        return self.spec.num_slots - len(self.idle_slots)

    @property
    def moving(self) -> int:
        """Granules that nothing but moves in flight keeps from being available."""
        return self.cache.pinned

    def available(self) -> int:
        """Granules that can still be given out: free, cached by nobody's request, or mapped ahead."""
        return self.pool.free + self.cache.idle + self.granules.ahead

    def needed(self, slot: int) -> int:
        """Granules the sequence in a slot needs, shared ones included."""
        return self.granules.slots[slot].needed

    def beginning(self, number: int) -> list[tuple[int, int]]:
        """Units that a live slot shows and others may show too, from its position 0 on: full, and never written again.
        Of each the first granule, and how many there are."""
        slot = self._live(number)
        return [(held.unit.first, held.unit.count) for held in slot.held[: slot.indexed]]

    def admit(
        self,
        tokens: Sequence[int],
        room: int,
        headroom: int,
        key: str = "",
        read: bool = True,
    ) -> Admission | None:
        """Make a slot live for a sequence whose known tokens are `tokens`, with room for `room` tokens, no fewer.

        It shows what the prompt cache has of them under `key`, all but the last token at most, unless `read` is off.
        None, with nothing changed, when no slot is idle, `room` is longer than a slot or fewer than `headroom` granules
        would stay available.
        """
        if not self.idle_slots or room > self.spec.max_tokens:
            return None
        if self._is_refused(tokens, room, headroom):
            return None
        match = self._match(tokens, room, headroom, key, read)
        if match is None:
            self._refused = (tokens, room, headroom, self._news)
            return None
        slot = self.granules.slots[self._choose_slot(match)]
        del self.idle_slots[slot.number]
        slot.live, slot.key = True, key
        self._show_match(slot, match)
        shown = slot.granules
        if slot.left is not None and self.pool.free < self.spec.granules(room) - slot.granules:
            # What was here last is next to go anyhow; gone now, its granules need not be mapped again.
            self.cache.evict_branch(slot.left)
        if not self.grow(slot.number, room):
            raise RuntimeError(
                f"slot {slot.number} has no room for {room} tokens, which the KV accounting has promised"
            )
        self._copy_match(slot, match)
        self._preparation.note(range(shown, slot.needed))
        return Admission(slot.number, match.cached)

    def cached_tokens(self, tokens: Sequence[int], key: str = "", read: bool = True) -> int:
        """What the prompt cache has of a sequence's known tokens, arguments as of `admit`; nothing is held for it."""
        if not self._caching or not read:
            return 0
        return self.cache.match(key, pack(tokens), len(tokens) - 1, self._plans).cached

    def is_shown(self, number: int, tokens: int) -> bool:
        """Whether the next plan's step need not wait for a slot to show its first `tokens` tokens."""
        if self._progress is None:
            return True
        granules = self.spec.granules(tokens)
        mine = (view for view in self.granules.plan.views if view.slot == number and isinstance(view, Show))
        return all(view.position >= granules for view in mine) and self._progress.is_shown(number, granules)

    def is_sound(self, number: int) -> bool:
        """Whether the prompt cache still holds what a live slot shares with it: it forgets what may be wrong."""
        slot = self._live(number)
        return not any(held.node is not None and held.node.lost for held in slot.held[: slot.indexed])

    def grow(self, number: int, tokens: int) -> bool:
        """Make a live slot hold at least `tokens` tokens. False, with nothing changed, if there is not enough."""
        slot = self._live(number)
        granules = self.spec.granules(tokens)
        if granules <= slot.needed:
            return True
        if tokens > self.spec.max_tokens or granules - slot.needed > self.available():
            return False
        self.granules.extend(slot, granules)
        return True

    def map_ahead(self, number: int, tokens: int) -> None:
        """Let a live slot hold one granule more than it needs once `tokens` tokens have half filled its last one, if
        one is free or cached. The granule stays available to others."""
        slot = self._live(number)
        size = self.spec.granule_tokens
        room = (slot.needed + 1) * size
        half_full = slot.granules == slot.needed and 2 * (room - tokens) <= 3 * size
        if half_full and room <= self.spec.max_tokens and self._sticky and self.pool.free + self.cache.idle:
            self.granules.extend_ahead(slot)

    def holds_ahead(self, number: int) -> bool:
        """Whether a live slot holds more than it needs."""
        slot = self._live(number)
        return slot.granules > slot.needed

    def remember(self, number: int, tokens: Sequence[int], written: int) -> None:
        """Put the full units among a live slot's first `written` tokens into the prompt cache. The next plan's step, or
        an earlier one, writes them."""
        slot = self._live(number)
        if not self._caching:
            return
        while not slot.broken and slot.indexed < len(slot.held):
            held = slot.held[slot.indexed]
            end = slot.tokens + held.unit.count * self.spec.granule_tokens
            if end > written:
                return
            packed = pack(tokens[slot.tokens : end])
            node, taken = self.cache.insert(slot.key, slot.node, packed, held.unit, born=self._plans)
            slot.broken = not taken
            if taken and node is not None:
                self._news += 1
                self.cache.use(node)
                held.node = slot.node = node
                slot.indexed, slot.tokens = slot.indexed + 1, end

    def release_slot(
        self, number: int, tokens: Sequence[int] = (), written: int = 0, *, valid: bool = True, proven: bool = True
    ) -> None:
        """Make a live slot idle; nothing in flight may touch its memory any more.

        The KV of its first `written` tokens, which are `tokens`, stays in the prompt cache. `proven`: a token was
        sampled from it. Not `valid`: what was sampled was no number; so all that may be wrong is forgotten, that is
        what no other sequence has proven.
        """
        slot = self._live(number)
        if not valid:
            self._forget(slot)
        elif self._caching:
            self._keep(slot, tokens, written, proven)
        for held in slot.held[slot.indexed :]:
            self.pool.give(held.unit)
        for held in reversed(slot.held[: slot.indexed]):
            if held.node is not None:
                held.node.proven |= proven and valid
                self.cache.release(held.node)
        if slot.node is not None:
            slot.node.slot = number
        self._news += 1
        self.granules.clear(slot, hide=not self._sticky)
        self.idle_slots[number] = None

    def drain_ops(self) -> MemoryPlan:
        """The operations since the last call, for the next step; it must be run and later be `complete`d."""
        if self._sticky and self.idle_slots:
            self._preparation.prepare(list(islice(self._next_slots(), PREPARED_SLOTS)))
        if self.swap.num_places and self.granules.tight:
            self._spill()
        plan, self.granules.plan = self.granules.plan, MemoryPlan()
        self._plans += 1
        return plan

    def complete(self, plans: int) -> None:
        """The first `plans` drained plans have been carried out."""
        while self.pinned and self.pinned[0][0] <= plans:
            self._news += 1
            self.cache.unpin(self.pinned.popleft()[1])

    def reset_prompt_cache(self) -> None:
        """Forget every cached prompt that no live slot uses. Only while no plan is in flight."""
        self.cache.reset()

    def check(self) -> None:
        """Raise `RuntimeError` if a count is wrong. For tests and idle moments: visits every slot."""
        accounting_check.check(self.spec, self.pool, self.cache, self.granules, self.idle_slots, self.pinned)

    def _is_refused(self, tokens: Sequence[int], room: int, headroom: int) -> bool:
        """Whether the same sequence was refused the last time and nothing has changed for the better: who waits asks in
        every step, and a long prompt takes a millisecond to match."""
        before, its_room, its_headroom, news = self._refused
        return before is tokens and its_room == room and its_headroom <= headroom and news == self._news

    def _match(self, tokens: Sequence[int], room: int, headroom: int, key: str, read: bool) -> Match | None:
        """What of a sequence can be shown and copied; None when there is no room for the rest of it."""
        if not self._caching or not read:
            return Match() if self._has_room(Match(), room, headroom) else None
        packed = pack(tokens)
        # What is copied is kept in memory beside its copy: where that is too much, nothing is.
        for copyable in (self._plans, 0):
            match = self.cache.match(key, packed, len(tokens) - 1, copyable)
            if self._has_room(match, room, headroom):
                return match
            if match.source is None:
                break
        return None

    def _has_room(self, match: Match, room: int, headroom: int) -> bool:
        """Whether a sequence with this match can enter: what it needs anew, and what it keeps from being evicted."""
        resident = [node for node in match.path if node.unit is not None]
        new = self.spec.granules(room) - sum([node.count for node in resident])
        kept = resident if match.source is None else [*resident, match.source]
        return new + sum([node.count for node in kept if not node.busy]) + headroom <= self.available()

    def _choose_slot(self, match: Match) -> int:
        """The idle slot that still shows the cached beginning if there is one, else the next one."""
        if match.path and match.path[-1].slot in self.idle_slots:
            return match.path[-1].slot
        return next(self._next_slots())

    def _next_slots(self) -> Iterator[int]:
        """The slot idle longest first, whose own sequence will be evicted first; without a prompt cache the latest,
        which shows granules that are free."""
        return iter(self.idle_slots) if self._caching else reversed(self.idle_slots)

    def _show_match(self, slot: Slot, match: Match) -> None:
        """Hold the units of a match, those on the host brought back; shortens it where no block is left for one."""
        resident = [node for node in match.path if node.unit is not None]
        for node in resident:
            self.cache.use(node)
        if match.source is not None:
            self._pin(match.source, touch=True)
        for node in resident:
            self._hold(slot, node)
        for node in match.path[len(resident) :]:
            if not self._bring_back(slot, node):
                match.length = slot.tokens
                break
        slot.needed = slot.granules

    def _hold(self, slot: Slot, node: Node) -> None:
        """Make a slot, a user of the node already, hold and show its unit."""
        if node.unit is None:
            raise ValueError("only a node on the device can be shown")
        self.granules.hold(slot, Held(node.unit, node), self.granules.plan.views)
        slot.node = node
        slot.indexed += 1
        slot.tokens += node.count * self.spec.granule_tokens

    def _bring_back(self, slot: Slot, node: Node) -> bool:
        """Copy a node on the host to a unit of the pool, for a slot to use; False when no block is free for it."""
        unit = self.granules.take(slot, node.count)
        if unit.count != node.count:
            self.pool.give(unit)
            return False
        places = self.cache.land(node, unit)
        self.cache.use(node)
        self._hold(slot, node)
        moves = zip(places, unit.granules, strict=True)
        self.granules.plan.moves += [SwapIn(place, granule) for place, granule in moves]
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
            self.granules.plan.moves.append(Copy(source, slot.view.granules[first + index], tokens))

    def _keep(self, slot: Slot, tokens: Sequence[int], written: int, proven: bool) -> None:
        """Leave what an ended sequence has written to the prompt cache, its last granule as a tail.

        A unit with a twin there is the sequence's own still; the path goes on behind the twin.
        """
        own: list[Held] = []
        slot.left = slot.node
        for held in slot.held[slot.indexed :]:
            end = slot.tokens + held.unit.count * self.spec.granule_tokens
            known = min(end, written)
            node, taken = None, False
            if known - slot.tokens >= COPY_TOKENS:
                packed = pack(tokens[slot.tokens : known])
                node, taken = self.cache.insert(slot.key, slot.node, packed, held.unit, born=0, tail=known < end)
            if taken and node is not None:
                node.proven = proven
            else:
                own.append(held)
            slot.left = node or slot.left
            if node is not None and known == end:
                slot.node = node
            slot.tokens = end
        slot.held[slot.indexed :] = own

    def _forget(self, slot: Slot) -> None:
        """Forget the first part of a sequence that may be wrong, and all that follows it."""
        for held in slot.held[: slot.indexed]:
            if held.node is not None and not held.node.proven:
                self.cache.forget(held.node)
                break
        slot.node = None

    def _spill(self) -> None:
        """Copy units that will be evicted soon to the host, so that their contents survive."""
        for node, places in self.cache.spill(self._plans, SPILL_GRANULES, SPILL_SEARCH):
            self.pinned.append((self._plans, node))
            if node.unit is not None:
                moves = zip(node.unit.granules, places, strict=True)
                self.granules.plan.moves += [SwapOut(granule, place) for granule, place in moves]

    def _pin(self, node: Node, touch: bool) -> None:
        self.cache.pin(node, touch)
        self.pinned.append((self._plans, node))

    def _live(self, number: int) -> Slot:
        slot = self.granules.slots[number]
        if not slot.live:
            raise ValueError(f"slot {number} is not live")
        return slot
