"""A naive accounting that drives an arena by its contract, and knows what every token of every slot must be."""

from collections import Counter

import numpy as np

from bladellm_runtime.kv.operations import Copy, Hide, MemoryPlan, Show, SwapIn, SwapOut
from tests.kv.arena_cases import UNKNOWN, assert_holds, write

Unit = tuple[int, int]
"""First granule and number of granules, 1 or a whole block, of what is taken at once."""


class AccountingModel:
    """Slots and cached prompts hold units; `references` counts their holders. `stamps` says what each token of each
    granule is. Operations gather in a plan that `commit` executes; a granule freed in a plan is not taken in it."""

    def __init__(self, arena):
        self.arena, self.spec = arena, arena.spec
        self.block = self.spec.block_granules
        self.slots: list[list[Unit]] = [[] for _ in range(self.spec.num_slots)]
        self.cached: list[list[Unit]] = []
        self.references = Counter()
        self.whole = [True] * (self.spec.num_granules // self.block)
        self.generation = [0] * len(self.whole)
        self.views = [{} for _ in self.slots]
        self.stamps = np.zeros((self.spec.num_granules, self.spec.granule_tokens), np.int64)
        self.host = {}
        self.last_stamp = 0
        self.plan = MemoryPlan()
        self.freed = set()
        self.converted = set()

    def granules(self, slot):
        return [granule + i for granule, count in self.slots[slot] for i in range(count)]

    def room(self, slot):
        return self.spec.max_tokens // self.spec.granule_tokens - len(self.granules(slot))

    def free(self, granule):
        return self.references[granule] == 0 and granule not in self.freed

    def free_blocks(self):
        firsts = range(0, self.spec.num_granules, self.block)
        return [first for first in firsts if all(self.free(first + i) for i in range(self.block))]

    def free_singles(self):
        """Free granules outside blocks taken whole."""
        return [g for g in range(self.spec.num_granules) if self.free(g) and not self.taken_whole(g // self.block)]

    def taken_whole(self, block):
        return self.whole[block] and any(not self.free(block * self.block + i) for i in range(self.block))

    def grow(self, slot, units, ahead=False):
        """Append free units to a slot, showing what it does not show yet."""
        for granule, count in units:
            self.take(granule, count > 1)
        self.append(slot, units, ahead)

    def take(self, granule, whole):
        """Take a unit otherwise than before if need be."""
        block = granule // self.block
        if self.block > 1 and self.whole[block] != whole:
            self.whole[block] = whole
            self.generation[block] += 1
            self.converted.add(block)
            lost = slice(block * self.block, (block + 1) * self.block)
            self.stamps[lost][self.stamps[lost] != 0] = UNKNOWN
        if not self.arena.shares and self.last_stamp:
            self.stamps[granule : granule + (self.block if whole else 1)] = UNKNOWN

    def append(self, slot, units, ahead=False):
        views = self.plan.ahead if ahead else self.plan.views
        position, singles = len(self.granules(slot)), []
        for granule, count in units:
            self.references.update(range(granule, granule + count))
            self.slots[slot].append((granule, count))
            shown = all(self.shows(slot, position + i, granule + i) for i in range(count))
            if count == 1 and not shown:
                singles.append(granule)
            elif singles:
                views.append(Show(slot, position - len(singles), singles))
                singles = []
            if count > 1 and not shown:
                views.append(Show(slot, position, list(range(granule, granule + count)), whole=True))
            for i in range(count):
                self.views[slot][position + i] = (granule + i, self.generation[granule // self.block])
            position += count
        if singles:
            views.append(Show(slot, position - len(singles), singles))

    def shows(self, slot, position, granule):
        return self.views[slot].get(position) == (granule, self.generation[granule // self.block])

    def shrink(self, slot, units, hide=True):
        """Give up a slot's units after the first `units`; what it shows stays unless hidden."""
        for granule, count in self.slots[slot][units:]:
            self.drop(granule, count)
        del self.slots[slot][units:]
        if hide:
            keep = len(self.granules(slot))
            self.plan.views.append(Hide(slot, keep))
            self.views[slot] = {p: view for p, view in self.views[slot].items() if p < keep}

    def drop(self, granule, count):
        for number in range(granule, granule + count):
            self.references[number] -= 1
            self.freed.add(number)
            if not self.arena.shares:
                self.stamps[number] = UNKNOWN

    def cache(self, slot):
        units = list(self.slots[slot])
        for granule, count in units:
            self.references.update(range(granule, granule + count))
        self.cached.append(units)

    def evict(self, index):
        for granule, count in self.cached.pop(index):
            self.drop(granule, count)

    def move(self, move):
        """Add a copy of contents to the plan, and note what it does. What the plan makes new is not copied from."""
        source = move.source if isinstance(move, Copy) else move.granule
        if source // self.block in self.converted:
            self.commit()
        self.plan.moves.append(move)
        if isinstance(move, Copy):
            self.stamps[move.target, : move.tokens] = self.stamps[move.source, : move.tokens]
        elif isinstance(move, SwapOut):
            self.host[move.host] = self.stamps[move.granule].copy()
        elif isinstance(move, SwapIn):
            self.stamps[move.granule] = self.host[move.host]

    def commit(self):
        """Execute the plan."""
        plan, self.plan = self.plan, MemoryPlan()
        self.freed.clear()
        self.converted.clear()
        self.arena.submit(plan)
        self.arena.wait()
        self.arena.move(plan.moves)

    def write(self, slot, first, count):
        """Write new, distinct tokens through the arena and note them."""
        if count == 0:
            return
        stamps = np.arange(self.last_stamp + 1, self.last_stamp + 1 + count)
        self.last_stamp += count
        size, granules = self.spec.granule_tokens, self.granules(slot)
        positions = np.arange(first, first + count)
        self.stamps[np.array(granules)[positions // size], positions % size] = stamps
        write(self.arena, slot, first, stamps)

    def check(self):
        """Every token of every slot is what it must be. Nothing may be left in the plan."""
        self.arena.submit(MemoryPlan())
        self.arena.wait()
        for slot in range(self.spec.num_slots):
            if granules := self.granules(slot):
                assert list(self.arena.granules(slot))[: len(granules)] == granules
                assert_holds(self.arena, slot, self.stamps[granules].reshape(-1))
