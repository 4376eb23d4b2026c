"""Both arenas against a reference: whatever slots do, every mapped row holds what was last written to it."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from bladellm_runtime.kv.relocating import copy_rows
from tests.kv.arena_cases import GEOMETRIES, Geometry, Reference

NUMBERS = st.integers(0, 10**6)
KINDS = ["memfd", "relocating"]


class ArenaMachine(RuleBasedStateMachine):
    """Random maps, unmaps, aliases and writes; what is mapped anew or unmapped is overwritten first (poison)."""

    kind = ""

    @initialize(geometry=GEOMETRIES)
    def start(self, geometry):
        self.arena = geometry.arena(self.kind)
        self.reference = Reference(self.arena)
        self.spec = self.arena.spec
        self.slot_granules = self.spec.max_tokens // self.spec.granule_tokens

    @rule(slot=NUMBERS, granules=NUMBERS)
    def map(self, slot, granules):
        slot, granules = slot % self.spec.num_slots, granules % (self.slot_granules + 1)
        held = self.reference.held(slot)
        added = granules - len(held)
        if added > self.reference.free():
            with pytest.raises(MemoryError):
                self.arena.map(slot, granules)
            return
        self.arena.map(slot, granules)
        first = len(held)
        held.extend(self.reference.fresh(added))
        self.reference.write(slot, first * self.spec.granule_tokens, max(0, added) * self.spec.granule_tokens)

    @rule(slot=NUMBERS, granules=NUMBERS)
    def unmap(self, slot, granules):
        slot = slot % self.spec.num_slots
        held = self.reference.held(slot)
        granules %= len(held) + 1
        first = granules * self.spec.granule_tokens
        self.reference.write(slot, first, len(held) * self.spec.granule_tokens - first)
        self.arena.unmap(slot, granules)
        del held[granules:]

    @rule(source=NUMBERS, receiver=NUMBERS, granules=NUMBERS)
    def alias(self, source, receiver, granules):
        source, receiver = source % self.spec.num_slots, receiver % self.spec.num_slots
        lent = self.reference.held(source)[: granules % (len(self.reference.held(source)) + 1)]
        if self.reference.held(receiver):
            with pytest.raises(ValueError, match="lend"):
                self.arena.alias(source, receiver, len(lent))
            return
        if self.kind == "relocating":
            if len(lent) > self.reference.free():
                with pytest.raises(MemoryError):
                    self.arena.alias(source, receiver, len(lent))
                return
            self.arena.alias(source, receiver, len(lent))
            lent = [type(granule)(granule.stamps.copy()) for granule in lent]
        else:
            self.arena.alias(source, receiver, len(lent))
        self.reference.slots[receiver] = list(lent)

    @rule(slot=NUMBERS, first=NUMBERS, count=NUMBERS)
    def write(self, slot, first, count):
        slot = slot % self.spec.num_slots
        tokens = len(self.reference.held(slot)) * self.spec.granule_tokens
        first %= tokens + 1
        self.reference.write(slot, first, count % (tokens - first + 1))

    @invariant()
    def contents(self):
        if hasattr(self, "reference"):
            self.reference.check()

    def teardown(self):
        if hasattr(self, "arena"):
            self.arena.close()


class MemfdMachine(ArenaMachine):
    kind = "memfd"


class RelocatingMachine(ArenaMachine):
    kind = "relocating"


QUICK = settings(max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
THOROUGH = settings(QUICK, max_examples=500, stateful_step_count=60)

TestMemfd = MemfdMachine.TestCase
TestMemfd.settings = QUICK
TestRelocating = RelocatingMachine.TestCase
TestRelocating.settings = QUICK


@pytest.mark.slow
@pytest.mark.parametrize("machine", [MemfdMachine, RelocatingMachine])
def test_contents_survive_thorough(machine):
    case = type("Thorough", (machine.TestCase,), {"settings": THOROUGH})
    case("runTest").debug()


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def geometry():
    return Geometry(3, 2, 2, 16, torch.float32, num_slots=4, granules=12, max_granules=8)


def test_exhaustion_raises_and_leaves_the_slot_as_it_was(kind, geometry):
    arena = geometry.arena(kind)
    reference = Reference(arena)
    for slot, granules in ((0, 7), (1, 4)):
        arena.map(slot, granules)
        reference.held(slot).extend(reference.fresh(granules))
        reference.write(slot, 0, granules * arena.spec.granule_tokens)
    for _ in range(3):
        with pytest.raises(MemoryError, match="1 free granules, 2 are needed"):
            arena.map(2, 2)
    assert arena.mapped(2) == 0
    reference.check()
    arena.map(2, 1)
    arena.close()


def test_arguments_outside_the_arena_are_refused(kind, geometry):
    arena = geometry.arena(kind)
    for slot, granules in ((-1, 1), (4, 1), (0, 9), (0, -1)):
        with pytest.raises(ValueError, match="outside the KV arena"):
            arena.map(slot, granules)
        with pytest.raises(ValueError, match="outside the KV arena"):
            arena.unmap(slot, granules)
    arena.map(0, 2)
    with pytest.raises(ValueError, match="lend"):
        arena.alias(0, 1, 3)
    with pytest.raises(ValueError, match="lend"):
        arena.alias(0, 0, 2)
    arena.close()


def test_a_closed_arena_refuses_to_map(kind, geometry):
    arena = geometry.arena(kind)
    arena.map(0, 1)
    arena.close()
    arena.close()
    with pytest.raises(ValueError, match="closed"):
        arena.map(1, 1)


def test_apply_unmaps_before_it_maps(kind, geometry):
    arena = geometry.arena(kind)
    arena.apply([], [(0, 8), (1, 4)])
    arena.apply([(0, 2)], [(2, 6)])
    assert [arena.mapped(slot) for slot in range(4)] == [2, 4, 6, 0]
    arena.close()


def test_rows_can_be_indexed_like_any_tensor(kind, geometry):
    """The ways attention and KV writes reach rows: index_put, index_select, slices, matmul over a view."""
    arena = geometry.arena(kind)
    arena.map(1, 3)
    arena.map(3, 2)
    rows = torch.tensor([arena.base_row(3) + 1, arena.base_row(1) + 5])
    values = torch.randn(2, 2, 2, 16)
    for layer in range(3):
        kv = arena.layer_kv(layer)
        kv[rows] = values + layer
        assert torch.equal(kv.index_select(0, rows), values + layer)
        view = arena.view(3, layer, 2)
        assert view.data_ptr() == kv[arena.base_row(3)].data_ptr()
        keys = view[1:2, 0].transpose(0, 1)
        assert torch.allclose(keys @ keys.transpose(1, 2), (values[0, 0] + layer).pow(2).sum(-1)[:, None, None])
    arena.close()


@settings(deadline=None)
@given(st.data())
def test_copy_rows_equals_a_copy_through_a_clone(data):
    length = data.draw(st.integers(1, 60))
    count = data.draw(st.integers(1, length))
    source, target = (data.draw(st.integers(0, length - count)) for _ in range(2))
    scratch = torch.empty(data.draw(st.integers(1, 20)), 2)
    rows = torch.from_numpy(np.random.default_rng().normal(size=(length, 2))).float()
    expected = rows.clone()
    expected[target : target + count] = rows[source : source + count].clone()
    copy_rows(rows, source, target, count, scratch)
    assert torch.equal(rows, expected)


def test_relocations_are_counted():
    geometry = Geometry(2, 2, 1, 8, torch.float32, num_slots=2, granules=10, max_granules=9)
    arena = geometry.arena("relocating")
    arena.map(0, 2)
    arena.map(1, 2)
    assert arena.relocated_granules == 0
    bases = arena.base_row(0), arena.base_row(1)
    arena.map(0, 8)
    assert (arena.base_row(0), arena.base_row(1)) != bases
    assert 2 <= arena.relocated_granules <= 4
    arena.close()
