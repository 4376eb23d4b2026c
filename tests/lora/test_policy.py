"""The policy under random use: no slot in use changes hands, nothing is counted twice, all counters end at zero."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.lora.policy import AdapterPolicy

ADAPTERS = [f"adapter {number}" for number in range(6)]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["acquire", "acquire", "release", "loaded", "failed", "forget"]), st.sampled_from(ADAPTERS)
    ),
    max_size=80,
)


class Device:
    """What the moves make of slots and copies, and who uses what: kept apart from the policy's own books."""

    def __init__(self, slots, copies):
        self.policy = AdapterPolicy(slots, copies)
        self.slots = [None] * slots
        self.most_copies = copies
        self.copies = set()
        self.pending = {}
        self.uses = []

    def acquire(self, adapter):
        before = (self.policy.in_slots, self.policy.copies, self.policy.in_use)
        acquired = self.policy.acquire(adapter)
        if acquired is None:
            assert adapter not in self.slots
            assert (self.policy.in_slots, self.policy.copies, self.policy.in_use) == before
            busy = {*self.uses, *self.pending}
            full = all(held in busy for held in self.slots)
            crowded = adapter not in self.copies and len(self.copies) == self.most_copies
            assert full or (crowded and self.copies <= set(self.pending)), "it is refused where there is no room alone"
            return
        move = acquired.move
        if move is not None:
            assert adapter not in self.slots
            assert self.slots[move.slot] == move.evicted
            assert move.evicted not in self.uses, "a slot in use is given away"
            assert move.evicted not in self.pending
            assert move.read == (adapter not in self.copies)
            if move.dropped is not None:
                assert move.dropped not in self.pending
                self.copies.remove(move.dropped)
            self.slots[move.slot] = adapter
            self.copies.add(adapter)
            self.pending[adapter] = move.slot
        assert self.slots[acquired.slot] == adapter
        self.uses.append(adapter)

    def release(self, adapter):
        if adapter in self.uses:
            self.policy.release(adapter)
            self.uses.remove(adapter)
        else:
            with pytest.raises(ValueError, match="not in use"):
                self.policy.release(adapter)

    def loaded(self, adapter):
        if adapter in self.pending:
            self.policy.loaded(adapter)
            assert self.policy.ready_slot(adapter) == self.pending.pop(adapter)

    def failed(self, adapter):
        if adapter in self.pending:
            self.policy.failed(adapter)
            self.slots[self.pending.pop(adapter)] = None
            self.copies.discard(adapter)

    def forget(self, adapter):
        gone = self.policy.forget(adapter)
        assert gone == (adapter not in self.uses and adapter not in self.pending)
        if gone:
            self.slots = [None if held == adapter else held for held in self.slots]
            self.copies.discard(adapter)

    def check(self):
        policy = self.policy
        held = {adapter: slot for slot, adapter in enumerate(self.slots) if adapter is not None}
        assert policy.in_slots == held
        assert set(policy.copies) == self.copies
        assert len(policy.copies) == len(self.copies) <= self.most_copies
        assert policy.in_use == {adapter: self.uses.count(adapter) for adapter in self.uses}
        for adapter in ADAPTERS:
            ready = None if adapter in self.pending else held.get(adapter)
            assert policy.ready_slot(adapter) == ready


@settings(max_examples=150, deadline=None)
@given(slots=st.integers(1, 4), copies=st.integers(1, 5), steps=STEPS)
def test_no_slot_in_use_is_given_away_and_counters_end_at_zero(slots, copies, steps):
    device = Device(slots, copies)
    for step, adapter in steps:
        getattr(device, step)(adapter)
        device.check()
    for adapter in list(device.pending):
        device.loaded(adapter)
    for adapter in list(device.uses):
        device.release(adapter)
    for adapter in ADAPTERS:
        assert device.policy.forget(adapter)
    assert device.policy.in_use == {}
    assert device.policy.in_slots == {}
    assert device.policy.copies == ()
    taken = [device.policy.acquire(adapter) for adapter in ADAPTERS[:slots]]
    assert sum(each is not None for each in taken) == min(slots, copies), "every slot can be given away again"


def used_once(policy, adapter):
    acquired = policy.acquire(adapter)
    if acquired.move is not None:
        policy.loaded(adapter)
    policy.release(adapter)
    return acquired


def test_the_least_recently_used_goes_first_on_both_levels():
    policy = AdapterPolicy(2, 3)
    for adapter in "abca":
        used_once(policy, adapter)
    assert list(policy.in_slots) == ["c", "a"]
    assert policy.copies == ("b", "c", "a")
    move = used_once(policy, "d").move
    assert (move.evicted, move.dropped, move.read) == ("c", "b", True)
    move = used_once(policy, "c").move
    assert (move.evicted, move.dropped, move.read) == ("a", None, False)


def test_one_that_is_being_loaded_is_not_loaded_twice():
    policy = AdapterPolicy(2, 2)
    assert policy.acquire("a").move is not None
    assert policy.acquire("a").move is None
    assert policy.ready_slot("a") is None
    policy.loaded("a")
    assert policy.ready_slot("a") is not None
    assert policy.in_use == {"a": 2}


def test_there_must_be_room_for_one():
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least"):
            AdapterPolicy(*sizes)


def test_a_version_is_one_read_of_one_folder():
    """While a slot or a copy holds it, and never the same again."""
    policy, seen = AdapterPolicy(2, 3), set()
    current: dict[str, int] = {}
    for _ in range(600):
        name = random.choice("abcdef")
        if random.random() < 0.2:
            held = name in policy.in_slots or name in policy.copies
            assert policy.forget(name)
            if held:
                current.pop(name)
            continue
        acquired = policy.acquire(name)
        version = policy.version(name)
        if acquired.move is not None:
            policy.loaded(name)
        policy.release(name)
        if acquired.move is not None and acquired.move.read:
            assert version not in seen
            seen.add(version)
            current[name] = version
        assert version == current[name]
        current = {name: number for name, number in current.items() if name in policy.in_slots or name in policy.copies}
    assert len(seen) > 20
