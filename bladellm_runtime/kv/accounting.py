"""What the scheduler sees of KV memory: exact counts of granules, and the unmaps and maps that make them true."""

from bladellm_runtime.kv.spec import KvSpec


class KvAccounting:
    """Granules of every slot, counted without touching memory.

    A slot is *live* (a request holds it) or *idle*. It *holds* granules, of which a live slot *needs* those `grow`
    asked for. What is held and not needed is *retained*: all of an idle slot's granules, and what a live slot
    inherited beyond its need. Retained granules cost nothing to their slot's next tokens and go to whoever needs
    them once the pool is empty, so always `free + used + retained == spec.num_granules`.

    With `retain=False` (for arenas where held memory is in the way of others) an idle slot gives all back at once.
    """

    def __init__(self, spec: KvSpec, retain: bool = True) -> None:
        self.spec = spec
        self.free = spec.num_granules
        self.used = 0
        self.retain = retain
        self._held = [0] * spec.num_slots
        self._needed = [0] * spec.num_slots
        self._live: set[int] = set()
        self._empty = list(reversed(range(spec.num_slots)))
        # Dicts as ordered sets, oldest first: idle slots that hold granules, live slots that hold more than they need.
        self._keeping: dict[int, None] = {}
        self._surplus: dict[int, None] = {}
        self._before: dict[int, int] = {}

    @property
    def retained(self) -> int:
        """Granules that are held but not needed."""
        return self.spec.num_granules - self.free - self.used

    @property
    def live(self) -> int:
        """Slots that requests hold."""
        return len(self._live)

    def held(self, slot: int) -> int:
        """Granules the slot holds, needed or not."""
        return self._held[slot]

    def available(self) -> int:
        """Granules that can still be given out: the pool and what is retained."""
        return self.spec.num_granules - self.used

    def acquire_slot(self) -> int | None:
        """Make an idle slot live; `None` when all are. The slot that went idle last comes first: its granules are
        mapped already, warm, and the last to be reclaimed."""
        if self._keeping:
            slot, _ = self._keeping.popitem()
            self._surplus[slot] = None
        elif self._empty:
            slot = self._empty.pop()
        else:
            return None
        self._live.add(slot)
        return slot

    def can_grow(self, slot: int, tokens: int) -> bool:
        """Whether `grow` with the same arguments would succeed."""
        granules = self.spec.granules(tokens)
        return tokens <= self.spec.max_tokens and granules - self._needed[slot] <= self.available()

    def grow(self, slot: int, tokens: int) -> bool:
        """Make a live slot hold at least `tokens` tokens, from what it retains, then the pool, then other slots.

        Idle slots are reclaimed from first, the one idle longest before the others. Returns False and changes
        nothing if there is not enough. Never shrinks what the slot needs.
        """
        self._check_live(slot)
        granules = self.spec.granules(tokens)
        if granules <= self._needed[slot]:
            return True
        if not self.can_grow(slot, tokens):
            return False
        self.used += granules - self._needed[slot]
        self._needed[slot] = granules
        if granules >= self._held[slot]:
            self._surplus.pop(slot, None)
        missing = granules - self._held[slot]
        if missing > 0:
            self._reclaim(missing - self.free)
            self._hold(slot, granules)
        return True

    def release_slot(self, slot: int) -> None:
        """Make a live slot idle. Nothing in flight may touch its memory any more; it keeps its granules for now."""
        self._check_live(slot)
        self._live.remove(slot)
        self._surplus.pop(slot, None)
        self.used -= self._needed[slot]
        self._needed[slot] = 0
        if not self.retain:
            self._hold(slot, 0)
        if self._held[slot]:
            self._keeping[slot] = None
        else:
            self._empty.append(slot)

    def drain_ops(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The (unmaps, maps) since the last call for the step plan, each (slot, granules it holds afterwards).

        Only the net change of a slot counts, so it is in at most one list; unmaps executed first make room for maps.
        """
        changes = [(slot, before, self._held[slot]) for slot, before in self._before.items()]
        self._before.clear()
        unmaps = [(slot, after) for slot, before, after in changes if after < before]
        maps = [(slot, after) for slot, before, after in changes if after > before]
        return unmaps, maps

    def check(self) -> None:
        """Raise `RuntimeError` if a count is wrong. For tests and idle moments: visits every slot."""
        slots = range(self.spec.num_slots)
        idle = [*self._keeping, *self._empty]
        problems = {
            "granules are lost or invented": self.free + sum(self._held) != self.spec.num_granules,
            "the pool is negative": self.free < 0,
            "a slot needs more than it holds": any(not 0 <= self._needed[s] <= self._held[s] for s in slots),
            "used is not the sum of needs": self.used != sum(self._needed),
            "a slot is neither live nor idle, or both": sorted([*self._live, *idle]) != list(slots),
            "an idle slot needs granules": any(self._needed[s] for s in idle),
            "idle slots are filed wrongly": any(self._held[s] for s in self._empty)
            or not all(self._held[s] for s in self._keeping),
            "surplus is filed wrongly": set(self._surplus)
            != {s for s in self._live if self._held[s] > self._needed[s]},
        }
        found = [text for text, wrong in problems.items() if wrong]
        if found:
            raise RuntimeError("KV accounting: " + "; ".join(found))

    def _reclaim(self, granules: int) -> None:
        """Move retained granules to the pool, as many as asked for and no more, idle slots before live ones."""
        while granules > 0:
            shelf = self._keeping or self._surplus
            slot = next(iter(shelf))
            taken = min(granules, self._held[slot] - self._needed[slot])
            self._hold(slot, self._held[slot] - taken)
            granules -= taken
            if self._held[slot] == self._needed[slot]:
                del shelf[slot]
                if slot not in self._live:
                    self._empty.append(slot)

    def _hold(self, slot: int, granules: int) -> None:
        """Set what a slot holds, the difference going from or to the pool."""
        self._before.setdefault(slot, self._held[slot])
        self.free -= granules - self._held[slot]
        self._held[slot] = granules

    def _check_live(self, slot: int) -> None:
        if slot not in self._live:
            raise ValueError(f"slot {slot} is not live")
