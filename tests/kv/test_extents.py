"""The relocating arena's bookkeeping, on a list of stamps in place of memory."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bladellm_runtime.kv.extents import ExtentMap


class Memory:
    """A plain array that executes moves, and what each slot must find in it."""

    def __init__(self, num_granules):
        self.cells = np.full(num_granules, -1)
        self.extents = ExtentMap(num_granules)
        self.contents = {}
        self.moved = self.stamp = 0

    def grow(self, slot, granules):
        for move in self.extents.grow(slot, granules):
            assert min(move.source, move.target) >= 0
            assert max(move.source, move.target) + move.count <= len(self.cells)
            self.cells[move.target : move.target + move.count] = self.cells[
                move.source : move.source + move.count
            ].copy()
            self.moved += move.count
        stamps = self.contents.setdefault(slot, [])
        for position in range(len(stamps), granules):
            self.stamp += 1
            stamps.append(self.stamp)
            self.cells[self.extents.start(slot) + position] = self.stamp

    def shrink(self, slot, granules):
        self.extents.shrink(slot, granules)
        stamps = self.contents.get(slot, [])
        removed = len(stamps) - granules
        del stamps[granules:]
        return max(0, removed)

    def check(self):
        self.extents.check()
        for slot, stamps in self.contents.items():
            start = self.extents.start(slot)
            assert self.extents.length(slot) == len(stamps)
            assert self.cells[start : start + len(stamps)].tolist() == stamps


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.integers(1, 40),
    st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 30)), max_size=60),
)
def test_growth_succeeds_whenever_the_total_allows_and_moves_keep_contents(size, operations):
    memory = Memory(size)
    for growing, slot, granules in operations:
        held = memory.extents.length(slot)
        if not growing:
            memory.shrink(slot, granules)
        elif granules - held > memory.extents.free:
            with pytest.raises(MemoryError):
                memory.extents.grow(slot, granules)
        else:
            memory.grow(slot, granules)
        memory.check()


def test_a_full_array_takes_every_last_granule():
    memory = Memory(100)
    random = np.random.default_rng()
    while memory.extents.free:
        memory.grow(slot := int(random.integers(12)), memory.extents.length(slot) + 1)
        memory.check()
    with pytest.raises(MemoryError):
        memory.grow(0, memory.extents.length(0) + 1)


def test_growth_with_room_to_spare_moves_nothing():
    memory = Memory(1024)
    for granules in range(1, 17):
        for slot in range(16):
            memory.grow(slot, granules)
    assert memory.moved == 0


def test_moves_stay_rare_on_a_serving_trace():
    """64 sequences of lognormal lengths, 90 % full: below 40 granules copied for each one mapped (usual: 17)."""
    random = np.random.default_rng()
    memory = Memory(3000)
    targets = {}
    for _ in range(12_000):
        slot = int(random.integers(64))
        if memory.extents.length(slot) >= targets.get(slot, 0):
            memory.shrink(slot, 0)
            prompt, answer = np.clip(random.lognormal(3, 0.8, 2), 1, 200).astype(int)
            targets[slot] = int(prompt + answer)
            if memory.extents.free >= 500:
                memory.grow(slot, int(prompt))
        while memory.extents.free <= 300:
            memory.shrink(int(random.integers(64)), 0)
        memory.grow(slot, memory.extents.length(slot) + 1)
    memory.check()
    assert memory.moved < 40 * memory.stamp
