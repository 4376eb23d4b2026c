"""Every arena against a naive model: whatever slots do, every token they show is what was last written to it."""

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from bladellm_runtime.kv.operations import Copy, Hide, Show, SwapIn, SwapOut
from tests.kv.accounting_model import AccountingModel
from tests.kv.arena_cases import GEOMETRIES, KINDS, Geometry, layers, run_plan
from tests.kv.fake_cuda import FakeCuda

NUMBERS = st.integers(0, 10**6)


class ArenaMachine(RuleBasedStateMachine):
    """Requests come, grow, share, are cached and go; memory moves; every plan's end is checked."""

    kind = ""

    @initialize(geometry=GEOMETRIES)
    def start(self, geometry):
        self.cuda = FakeCuda() if self.kind == "cuda" else None
        self.arena = geometry.arena(self.kind, self.cuda)
        self.model = AccountingModel(self.arena)
        self.spec = self.arena.spec

    @rule(slot=NUMBERS, count=st.integers(1, 6), seed=NUMBERS, stale=st.booleans())
    def grow(self, slot, count, seed, stale):
        slot %= self.spec.num_slots
        self.model.grow(slot, self.singles(slot, count, seed, stale))

    @rule(slot=NUMBERS, seed=NUMBERS, stale=st.booleans())
    def grow_by_a_block(self, slot, seed, stale):
        slot %= self.spec.num_slots
        self.model.grow(slot, self.whole_block(slot, seed, stale))

    @rule(slot=NUMBERS, count=st.integers(1, 6), seed=NUMBERS, whole=st.booleans())
    def grow_ahead(self, slot, count, seed, whole):
        slot %= self.spec.num_slots
        units = self.whole_block(slot, seed, False) if whole else self.singles(slot, count, seed, False)
        self.model.grow(slot, units, ahead=True)
        self.model.commit()

    @rule(slot=NUMBERS, units=NUMBERS)
    def shrink(self, slot, units):
        slot %= self.spec.num_slots
        self.model.shrink(slot, units % (len(self.model.slots[slot]) + 1))

    @rule(slot=NUMBERS, cache=st.booleans(), hide=st.booleans())
    def finish(self, slot, cache, hide):
        slot %= self.spec.num_slots
        if cache and self.arena.shares:
            self.model.cache(slot)
        self.model.shrink(slot, 0, hide or not self.arena.sticky)

    @rule(index=NUMBERS)
    def evict(self, index):
        if self.model.cached:
            self.model.evict(index % len(self.model.cached))

    @rule(slot=NUMBERS, index=NUMBERS, units=NUMBERS)
    def hit(self, slot, index, units):
        """An empty slot shows a cached prompt, or the beginning of what another slot shows."""
        slot %= self.spec.num_slots
        prompts = [*self.model.cached, *self.model.slots] if self.arena.shares else []
        if prompts and not self.model.slots[slot]:
            found = prompts[index % len(prompts)]
            self.model.append(slot, found[: units % (len(found) + 1)])

    @rule(source=NUMBERS, receiver=NUMBERS, tokens=NUMBERS)
    def copy(self, source, receiver, tokens):
        source, target = self.shown(source), self.shown(receiver)
        if source is not None and source != target:
            self.model.move(Copy(source, target, tokens % self.spec.granule_tokens + 1))
            self.settle()

    @rule(granule=NUMBERS, place=NUMBERS)
    def swap_out(self, granule, place):
        if (granule := self.shown(granule)) is not None:
            self.model.move(SwapOut(granule, place % self.spec.host_granules))
            self.settle()

    @rule(granule=NUMBERS, place=NUMBERS)
    def swap_in(self, granule, place):
        if (granule := self.shown(granule)) is not None and self.model.host:
            places = sorted(self.model.host)
            self.model.move(SwapIn(places[place % len(places)], granule))
            self.settle()

    @rule(slot=NUMBERS, first=NUMBERS, count=NUMBERS)
    def write(self, slot, first, count):
        self.settle()
        slot %= self.spec.num_slots
        tokens = len(self.model.granules(slot)) * self.spec.granule_tokens
        first %= tokens + 1
        self.model.write(slot, first, count % (tokens - first + 1))

    @rule()
    def settle(self):
        self.model.commit()
        self.model.check()

    def singles(self, slot, count, seed, stale):
        """Free granules for a slot: what it shows already at its end, or any."""
        free = self.model.free_singles()
        count = min(count, self.model.room(slot), len(free))
        if stale:
            shown = self.arena.granules(slot)[len(self.model.granules(slot)) :]
            free = [granule for granule in shown if granule in free] or free
        order = sorted(free, key=lambda granule: granule * 7919 * (seed + 1) % 1009) if not stale else free
        return [(granule, 1) for granule in order[:count]]

    def whole_block(self, slot, seed, stale):
        block, free = self.spec.block_granules, self.model.free_blocks()
        if block == 1 or not free or self.model.room(slot) < block:
            return []
        shown = self.arena.granules(slot)[len(self.model.granules(slot)) :]
        if stale and shown and shown[0] in free:
            return [(shown[0], block)]
        return [(free[seed % len(free)], block)]

    def shown(self, number):
        """A granule that some slot holds."""
        held = sorted({granule for slot in range(self.spec.num_slots) for granule in self.model.granules(slot)})
        return held[number % len(held)] if held else None

    def teardown(self):
        if hasattr(self, "arena"):
            self.settle()
            self.arena.close()
            if self.cuda is not None:
                self.cuda.dispose()


QUICK = settings(max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
THOROUGH = settings(QUICK, max_examples=500, stateful_step_count=60)
MACHINES = {kind: type(f"{kind.title()}Machine", (ArenaMachine,), {"kind": kind}) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_contents_survive(kind):
    case = type("Quick", (MACHINES[kind].TestCase,), {"settings": QUICK})
    case("runTest").debug()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(900)
def test_contents_survive_thorough(kind):
    case = type("Thorough", (MACHINES[kind].TestCase,), {"settings": THOROUGH})
    case("runTest").debug()
