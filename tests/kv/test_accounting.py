"""The scheduler's counts are exact: against a brute-force model, and against arenas that execute the plan."""

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.spec import KvGroup, KvSpec
from tests.kv.arena_cases import GEOMETRIES, Reference

NUMBERS = st.integers(0, 10**6)


class AccountingMachine(RuleBasedStateMachine):
    """Requests come, grow and go; now and then the plan's lists are executed on both arenas.

    The model knows only which tokens live slots were promised. What live slots had written before a plan was
    executed is still there after it.
    """

    @initialize(geometry=GEOMETRIES, retain=st.booleans())
    def start(self, geometry, retain):
        # Same numbers of granules in both arenas, different sizes; tokens are counted in the accounting's.
        self.references = [Reference(geometry.arena(kind)) for kind in ("memfd", "relocating")]
        spec = self.references[1].arena.spec
        self.spec = spec
        self.accounting = KvAccounting(spec, retain=retain)
        self.promised = {}

    def needs(self):
        return sum(self.spec.granules(tokens) for tokens in self.promised.values())

    @rule()
    def acquire(self):
        slot = self.accounting.acquire_slot()
        if len(self.promised) == self.spec.num_slots:
            assert slot is None
            return
        assert slot not in self.promised
        self.promised[slot] = 0
        for reference in self.references:
            reference.slots[slot] = []

    @rule(slot=NUMBERS, tokens=NUMBERS)
    def grow(self, slot, tokens):
        if not self.promised:
            return
        slot = sorted(self.promised)[slot % len(self.promised)]
        tokens %= self.spec.max_tokens + 3
        before = self.state()
        added = max(0, self.spec.granules(tokens) - self.spec.granules(self.promised[slot]))
        possible = tokens <= self.spec.max_tokens and self.needs() + added <= self.spec.num_granules
        assert self.accounting.can_grow(slot, tokens) == possible
        assert self.state() == before
        assert self.accounting.grow(slot, tokens) == possible
        if possible:
            self.promised[slot] = max(self.promised[slot], tokens)
        else:
            assert self.state() == before

    @rule(slot=NUMBERS)
    def release(self, slot):
        if not self.promised:
            return
        slot = sorted(self.promised)[slot % len(self.promised)]
        self.accounting.release_slot(slot)
        del self.promised[slot]
        for reference in self.references:
            reference.slots.pop(slot, None)

    @rule()
    def execute(self):
        unmaps, maps = self.accounting.drain_ops()
        slots = [slot for slot, _ in unmaps + maps]
        assert len(slots) == len(set(slots))
        for reference in self.references:
            reference.arena.apply(unmaps, maps)
            assert [reference.arena.mapped(slot) for slot in range(self.spec.num_slots)] == self.held()
            self.check_then_write(reference)
        assert self.accounting.drain_ops() == ([], [])

    def check_then_write(self, reference):
        for slot, tokens in self.promised.items():
            granules = reference.held(slot)
            if granules:
                reference.check_slot(slot, granules)
            granules.extend(reference.fresh(self.spec.granules(tokens) - len(granules)))
            reference.write(slot, 0, len(granules) * reference.arena.spec.granule_tokens)

    @invariant()
    def counts(self):
        if not hasattr(self, "accounting"):
            return
        self.accounting.check()
        assert self.accounting.used == self.needs()
        assert self.accounting.live == len(self.promised)
        assert self.accounting.free + sum(self.held()) == self.spec.num_granules
        assert self.accounting.available() == self.accounting.free + self.accounting.retained
        assert all(self.accounting.held(s) >= self.spec.granules(tokens) for s, tokens in self.promised.items())
        if not self.accounting.retain:
            assert self.accounting.retained == 0

    def held(self):
        return [self.accounting.held(slot) for slot in range(self.spec.num_slots)]

    def state(self):
        return self.accounting.free, self.accounting.used, self.held()

    def teardown(self):
        for reference in getattr(self, "references", []):
            reference.arena.close()


QUICK = settings(max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
TestAccounting = AccountingMachine.TestCase
TestAccounting.settings = QUICK


@pytest.mark.slow
def test_accounting_thorough():
    thorough = settings(QUICK, max_examples=800, stateful_step_count=60)
    type("Thorough", (AccountingMachine.TestCase,), {"settings": thorough})("runTest").debug()


@pytest.fixture
def accounting():
    """Ten granules of four tokens, four slots; whatever a test does, the counts are consistent after it."""
    accounting = KvAccounting(KvSpec((KvGroup((0,), 64),), 4, num_granules=10, num_slots=4, max_tokens=40))
    yield accounting
    accounting.check()


def test_a_slot_keeps_its_granules_until_they_are_needed(accounting):
    slot = accounting.acquire_slot()
    assert accounting.grow(slot, 21)
    accounting.drain_ops()
    accounting.release_slot(slot)
    assert (accounting.held(slot), accounting.free, accounting.used, accounting.retained) == (6, 4, 0, 6)
    assert accounting.drain_ops() == ([], [])
    assert accounting.acquire_slot() == slot
    assert accounting.grow(slot, 24)
    assert accounting.drain_ops() == ([], [])
    assert (accounting.used, accounting.retained) == (6, 0)


def test_the_pool_goes_first_then_the_slot_idle_longest(accounting):
    first, second, third, last = slots = [accounting.acquire_slot() for _ in range(4)]
    for slot in (first, second, third):
        assert accounting.grow(slot, 8)
    for slot in (second, first, third):
        accounting.release_slot(slot)
    accounting.drain_ops()
    assert accounting.grow(last, 16)
    assert accounting.drain_ops() == ([], [(last, 4)])
    assert accounting.grow(last, 28)
    assert accounting.drain_ops() == ([(second, 0), (first, 1)], [(last, 7)])
    assert [accounting.held(slot) for slot in slots] == [1, 0, 2, 7]


def test_the_slot_that_went_idle_last_is_used_first(accounting):
    slots = [accounting.acquire_slot() for _ in range(3)]
    for slot in slots:
        accounting.grow(slot, 4)
    for slot in slots:
        accounting.release_slot(slot)
    assert [accounting.acquire_slot() for _ in range(3)] == slots[::-1]


def test_what_a_short_request_inherits_goes_to_a_long_one(accounting):
    """A live slot with more granules than it needs never keeps another from growing."""
    short = accounting.acquire_slot()
    accounting.grow(short, 40)
    accounting.release_slot(short)
    assert accounting.acquire_slot() == short
    assert accounting.grow(short, 1)
    other = accounting.acquire_slot()
    accounting.drain_ops()
    assert accounting.can_grow(other, 36)
    assert not accounting.can_grow(other, 37)
    assert accounting.grow(other, 36)
    assert accounting.drain_ops() == ([(short, 1)], [(other, 9)])
    assert not accounting.grow(short, 5)


def test_idle_slots_are_reclaimed_before_what_live_ones_inherited(accounting):
    inheriting, idle, growing = [accounting.acquire_slot() for _ in range(3)]
    accounting.grow(inheriting, 20)
    accounting.grow(idle, 20)
    accounting.release_slot(inheriting)
    assert accounting.acquire_slot() == inheriting
    accounting.release_slot(idle)
    accounting.drain_ops()
    accounting.grow(growing, 20)
    assert accounting.drain_ops() == ([(idle, 0)], [(growing, 5)])
    accounting.grow(growing, 24)
    assert accounting.drain_ops() == ([(inheriting, 4)], [(growing, 6)])


def test_operations_between_two_plans_are_one(accounting):
    slot = accounting.acquire_slot()
    accounting.grow(slot, 40)
    accounting.release_slot(slot)
    other = accounting.acquire_slot()
    assert other == slot
    third = accounting.acquire_slot()
    accounting.grow(third, 20)
    accounting.grow(other, 20)
    assert accounting.drain_ops() == ([], [(slot, 5), (third, 5)])


def test_slots_are_released_once(accounting):
    slot = accounting.acquire_slot()
    accounting.release_slot(slot)
    with pytest.raises(ValueError, match="not live"):
        accounting.release_slot(slot)
    with pytest.raises(ValueError, match="not live"):
        accounting.grow(slot, 1)


def test_check_finds_wrong_counts(accounting):
    slot = accounting.acquire_slot()
    accounting.grow(slot, 9)
    accounting.free += 1
    with pytest.raises(RuntimeError, match="lost or invented"):
        accounting.check()
    accounting.free -= 1


def test_a_sequence_longer_than_the_cache_is_refused(accounting):
    slot = accounting.acquire_slot()
    assert not accounting.can_grow(slot, 41)
    assert not accounting.grow(slot, 41)
    assert accounting.grow(slot, int(np.int64(40)))
