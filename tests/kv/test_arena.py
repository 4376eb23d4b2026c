"""Every arena against a naive model: whatever slots do, every token they show is what was last written to it."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from bladellm_runtime.kv.cuda_driver import CudaDriver
from bladellm_runtime.kv.operations import Copy, Hide, Show, SwapIn, SwapOut
from bladellm_runtime.kv.relocating import copy_rows
from tests.kv.accounting_model import AccountingModel
from tests.kv.arena_cases import CPU, GEOMETRIES, KINDS, Geometry, assert_holds, layers, payload_rows, run_plan, write
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

    @rule(slot=NUMBERS)
    def fill(self, slot):
        self.settle()
        slot %= self.spec.num_slots
        self.model.write(slot, 0, len(self.model.granules(slot)) * self.spec.granule_tokens)

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


QUICK = settings(max_examples=20, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
THOROUGH = settings(QUICK, max_examples=500, stateful_step_count=60)
MACHINES = {kind: type(f"{kind.title()}Machine", (ArenaMachine,), {"kind": kind}) for kind in KINDS}


@pytest.mark.turns
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


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


QUANTIZED = Geometry(format="int4_affine", head_dim=20, dtype=torch.bfloat16)
WRONG = {
    "a slot below": [Show(-1, 0, [1])],
    "a slot above": [Show(4, 0, [1])],
    "a position above": [Show(0, 0, [*range(9)])],
    "a granule above": [Show(0, 0, [16])],
    "a granule below": [Show(0, 0, [-1])],
    "no granules": [Show(0, 0, [])],
    "a gap": [Show(0, 1, [3])],
    "a gap after a hide": [Show(0, 0, [1, 2, 3]), Hide(0, 1), Show(0, 2, [4])],
    "half a block": [Show(0, 0, [4, 5], whole=True)],
    "a block across blocks": [Show(0, 0, [6, 7, 8, 9], whole=True)],
    "a block in disorder": [Show(0, 0, [4, 6, 5, 7], whole=True)],
    "hiding in a slot above": [Hide(4, 0)],
    "keeping too much": [Hide(0, 9)],
}


@pytest.mark.parametrize("views", WRONG.values(), ids=WRONG)
def test_views_that_cannot_be_meant_are_refused(kind, views):
    arena = QUANTIZED.arena(kind)
    with pytest.raises(ValueError, match=r"outside the KV arena|leaves a gap|whole block of 4"):
        run_plan(arena, views)
    arena.close()


def test_a_closed_arena_refuses_plans(kind):
    arena = QUANTIZED.arena(kind)
    run_plan(arena, [Show(0, 0, [1])])
    arena.close()
    arena.close()
    for operation in (lambda: run_plan(arena, [Show(1, 0, [2])]), arena.wait, lambda: arena.move([Copy(1, 2, 1)])):
        with pytest.raises(ValueError, match="closed"):
            operation()


def test_fresh_memory_is_zero(kind):
    """Every granule of the pool, shown whole or not, with its scales."""
    arena = QUANTIZED.arena(kind)
    run_plan(arena, [Show(0, 0, [5, 4, 7, 6]), Show(1, 0, [8, 9, 10, 11], whole=True), Show(2, 0, [0, 1, 2, 3])])
    run_plan(arena, [Show(0, 4, [15, 14, 13, 12])])
    for slot, count in ((0, 8), (1, 4), (2, 4)):
        assert_holds(arena, slot, np.zeros(count * arena.spec.granule_tokens, np.int64))
    arena.close()


def test_layers_are_what_operators_expect(kind):
    arena = QUANTIZED.arena(kind)
    run_plan(arena, [Show(2, 0, [7, 5])])
    spec = arena.spec
    for kv in layers(arena):
        assert kv.payload.dtype == torch.uint8
        assert kv.payload.shape[1:] == (2, 2, 10)
        assert kv.payload.stride(-1) == 1
        assert (kv.kv_heads, kv.head_dim, kv.granule_tokens) == (2, 20, spec.granule_tokens)
        assert kv.scales.shape == (16, 2, 2, 2, spec.granule_tokens)
        assert (kv.scales.dtype, kv.scales.stride(-1)) == (torch.float16, 1)
        assert (kv.table.dtype, kv.table[2, :2].tolist()) == (torch.int32, [7, 5])
        assert kv.paged == (kind == "paged")
    assert arena.layer(1) is arena.layer(1)
    if kind == "paged":
        assert arena.base_row(3) == 0
    elif kind != "relocating":
        # Where kernels are launched with it, the first row must be mapped whatever slots show: a granule as a guard.
        guard = spec.granule_tokens if kind == "cuda" else 0
        assert arena.layer(0).payload.shape[0] == guard + spec.num_slots * spec.max_tokens
        assert arena.base_row(3) == guard + 3 * spec.max_tokens
        # K and V of a head are neighbours, then come the heads, then the layers of the group, then the tokens.
        assert arena.layer(0).payload.stride() == (80, 10, 20, 1)
        assert arena.layer(1).payload.data_ptr() - arena.layer(0).payload.data_ptr() == 40
        assert arena.layer(2).payload.stride() == (40, 10, 20, 1)
    arena.close()


def test_a_table_is_kept_only_where_it_is_read(kind):
    arena = Geometry().arena(kind)
    assert (arena.layer(0).table is not None) == (kind == "paged")
    assert arena.layer(0).scales is None
    arena.close()


def test_a_table_follows_shows_and_hides(kind):
    arena = QUANTIZED.arena(kind)
    table = arena.layer(0).table
    assert table.shape == (4, 8)
    run_plan(arena, [Show(1, 0, [3, 9, 1]), Show(2, 0, [4, 5, 6, 7], whole=True)])
    run_plan(arena, [Hide(1, 2), Show(2, 4, [8])], ahead=[Show(1, 2, [0])])
    assert table[1:3].tolist() == [[3, 9, 0, *[-1] * 5], [4, 5, 6, 7, 8, *[-1] * 3]]
    assert [list(arena.granules(slot)) for slot in (0, 1)] == [[], [3, 9, 0]]
    arena.close()


def test_rows_can_be_indexed_like_any_tensor(kind):
    """The ways attention and KV writes reach rows: index_put, index_select, slices, matmul over a view."""
    arena = Geometry(head_dim=8).arena(kind)
    run_plan(arena, [Show(1, 0, [9, 3, 4]), Show(3, 0, [1, 12])])
    values = torch.randn(2, 2, 2, 8)
    for index, kv in enumerate(layers(arena)):
        places = (payload_rows(arena, kv, slot, position, 1) for slot, position in ((3, 1), (1, 5)))
        rows = torch.cat([torch.arange(p.start, p.stop) if isinstance(p, slice) else p for p in places])
        kv.payload[rows] = values + index
        assert torch.equal(kv.payload.index_select(0, rows), values + index)
        keys = kv.payload[int(rows[0]) : int(rows[0]) + 1, 0].transpose(0, 1)
        assert torch.allclose(keys @ keys.transpose(1, 2), (values[0, 0] + index).pow(2).sum(-1)[:, None, None])
    arena.close()


def test_a_plan_hides_before_it_shows_what_was_hidden(kind):
    arena = QUANTIZED.arena(kind)
    run_plan(arena, [Show(0, 0, [*range(8)]), Show(1, 0, [*range(8, 16)])])
    run_plan(arena, [Hide(0, 2), Show(2, 0, [*range(2, 8)])])
    tokens = arena.spec.granule_tokens
    write(arena, 2, 0, np.arange(1, 6 * tokens + 1))
    write(arena, 0, 0, np.arange(1, 2 * tokens + 1))
    assert_holds(arena, 2, np.arange(1, 6 * tokens + 1))
    assert [len(arena.granules(slot)) for slot in range(4)] == [2, 8, 6, 0]
    arena.close()


@pytest.mark.parametrize("sharing", ["memfd", "paged", "cuda"])
def test_slots_that_share_granules_see_each_others_writes(sharing):
    arena = QUANTIZED.arena(sharing)
    run_plan(arena, [Show(0, 0, [6, 2, 4]), Show(1, 0, [6, 2]), Show(1, 2, [8, 9, 10, 11], whole=True)])
    run_plan(arena, [Show(2, 0, [6]), Show(2, 1, [8, 9, 10, 11], whole=True)])
    stamps = np.arange(1, 6 * arena.spec.granule_tokens + 1).reshape(6, -1)
    write(arena, 1, 0, stamps.reshape(-1))
    assert_holds(arena, 0, stamps[:2].reshape(-1))
    assert_holds(arena, 2, stamps[[0, 2, 3, 4, 5]].reshape(-1))
    run_plan(arena, [Hide(1, 0), Hide(0, 0)])
    assert_holds(arena, 2, stamps[[0, 2, 3, 4, 5]].reshape(-1))
    arena.close()


def test_moves_find_contents_and_scales(kind):
    """Granules far from their numbers' places, as relocating memory has them."""
    arena = QUANTIZED.arena(kind)
    tokens = arena.spec.granule_tokens
    run_plan(arena, [Show(0, 0, [15, 1]), Show(1, 0, [0, 14, 2])])
    stamps = np.arange(1, 5 * tokens + 1).reshape(5, tokens)
    write(arena, 0, 0, stamps[:2].reshape(-1))
    write(arena, 1, 0, stamps[2:].reshape(-1))
    run_plan(arena, [], [Copy(15, 14, tokens - 1), SwapOut(1, 2), Copy(2, 1, tokens), SwapIn(2, 0)])
    expected = stamps[[0, 4, 1, 0, 4]]
    expected[3, -1] = stamps[3, -1]
    assert_holds(arena, 0, expected[:2].reshape(-1))
    assert_holds(arena, 1, expected[2:].reshape(-1))
    arena.close()


def test_relocating_memory_has_each_granule_once():
    arena = QUANTIZED.arena("relocating")
    run_plan(arena, [Show(0, 0, [6, 2])])
    for views in ([Show(1, 0, [2])], [Show(0, 2, [6])]):
        with pytest.raises(ValueError, match="is shown already, by slot 0"):
            run_plan(arena, views)
    for move in (Copy(6, 3, 1), Copy(3, 6, 1), SwapOut(3, 0)):
        with pytest.raises(ValueError, match="granule 3 is shown by no slot"):
            arena.move([move])
    run_plan(arena, [Hide(0, 1), Show(1, 0, [2]), Show(0, 0, [5])], [Copy(5, 2, 1)])
    run_plan(arena, [Show(2, 0, [6])])
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
    arena = Geometry(blocks=10, block_granules=1, max_granules=9).arena("relocating")
    run_plan(arena, [Show(0, 0, [0, 1]), Show(1, 0, [2, 3])])
    assert arena.stats.relocated_granules == 0
    bases = arena.base_row(0), arena.base_row(1)
    run_plan(arena, [Show(0, 2, [*range(4, 10)])])
    assert (arena.base_row(0), arena.base_row(1)) != bases
    assert 2 <= arena.stats.relocated_granules <= 4
    arena.close()


def test_specs_that_do_not_fit_the_model_are_refused(kind):
    spec = QUANTIZED.spec(kind)
    for geometry in (QUANTIZED.but(kv_heads=3), QUANTIZED.but(format="int4")):
        arena = QUANTIZED.arena(kind)
        with pytest.raises(ValueError, match="bytes a token"):
            type(arena)(spec, geometry.shape, *([CPU, CudaDriver(0, FakeCuda())] if kind == "cuda" else [CPU]))
        arena.close()
