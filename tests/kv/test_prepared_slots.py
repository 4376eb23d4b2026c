"""The slot that is next shows free granules before a sequence needs them, and holds none."""

import itertools
import random

import pytest

from bladellm_runtime.kv.accounting import Admission, KvAccounting
from bladellm_runtime.kv.operations import MemoryPlan, Show
from bladellm_runtime.kv.slot_preparation import KEPT_SHARE, PREPARED_GRANULES, PREPARED_SLOTS
from bladellm_runtime.kv.spec import KvGroup, KvSpec

GRANULE, SLOTS = 8, 6
LENGTH = 3 * GRANULE


def accounting_of(granules: int = 64, block: int = 1, split: int = 0, *, prompt_cache: bool = True) -> KvAccounting:
    spec = KvSpec((KvGroup((0,), 64),), GRANULE, granules, SLOTS, granules * GRANULE, block, split)
    return KvAccounting(spec, prompt_cache=prompt_cache)


def prompt(length: int = LENGTH) -> list[int]:
    return [random.randrange(10**6) for _ in range(length)]


def enter(accounting: KvAccounting, tokens: list[int]) -> tuple[Admission, MemoryPlan]:
    """Let a sequence in; it stays. The plan of its step, and how it was let in."""
    admission = accounting.admit(tokens, len(tokens), 0)
    accounting.remember(admission.slot, tokens, len(tokens))
    plan = accounting.drain_ops()
    accounting.check()
    return admission, plan


def shown(views: list[Show], slot: int) -> list[int]:
    return [granule for view in views if view.slot == slot for granule in view.granules]


@pytest.mark.parametrize("prompt_cache", [True, False])
@pytest.mark.parametrize(("block", "split"), [(1, 0), (4, 16), (8, 4)])
def test_only_the_first_sequence_waits_for_its_granules(block, split, prompt_cache):
    accounting = accounting_of(64, block, split, prompt_cache=prompt_cache)
    admission, plan = enter(accounting, prompt())
    assert len(shown(plan.views, admission.slot)) == 3
    prepared = {}
    for _ in range(SLOTS - 1):
        prepared |= {view.slot: view.granules for view in plan.ahead}
        admission, plan = enter(accounting, prompt())
        assert not shown(plan.views, admission.slot)
        assert accounting.granules.slots[admission.slot].view.granules == prepared[admission.slot]


@pytest.mark.parametrize("prompt_cache", [True, False])
def test_what_a_slot_is_prepared_with_stays_free(prompt_cache):
    accounting = accounting_of(9, prompt_cache=prompt_cache)
    first, _ = enter(accounting, prompt())
    assert (accounting.used, accounting.pool.free) == (3, 6)
    # All of it goes to the first sequence; the next slot is prepared with nothing, and no count is wrong.
    assert accounting.grow(first.slot, 9 * GRANULE)
    assert accounting.pool.free == 0
    accounting.drain_ops()
    accounting.release_slot(first.slot)
    second, _ = enter(accounting, prompt())
    slot = accounting.granules.slots[second.slot]
    assert slot.view.granules[:3] == [held.unit.first for held in slot.held]
    assert len(slot.held) == 3


def test_growing_sequences_take_other_granules_first_and_what_they_take_is_replaced():
    accounting = accounting_of(64, 16, split=4)
    first, plan = enter(accounting, prompt())
    prepared = {granule for view in plan.ahead for granule in view.granules}
    assert len(prepared) == 3 * PREPARED_SLOTS
    for granules in range(4, 17 - 3 * PREPARED_SLOTS):
        assert accounting.grow(first.slot, granules * GRANULE)
        accounting.drain_ops()
        assert prepared.isdisjoint(accounting.granules.slots[first.slot].view.granules), "others are free"
    assert accounting.grow(first.slot, 16 * GRANULE)
    accounting.drain_ops()
    assert prepared <= set(accounting.granules.slots[first.slot].view.granules)
    second, plan = enter(accounting, prompt())
    assert not shown(plan.views, second.slot)


def test_whole_blocks_are_left_to_the_sequence():
    accounting = accounting_of(64, 4)
    _, plan = enter(accounting, prompt(2 * 4 * GRANULE))
    assert not plan.ahead
    _, plan = enter(accounting, prompt(6 * GRANULE))
    assert not plan.ahead, "there is nothing that the last granules of a sequence could follow"


def test_a_block_that_the_next_slot_shows_whole_is_not_cut():
    accounting = accounting_of(64, 4, split=8)
    beginning = prompt(GRANULE)
    for tokens in (beginning + prompt(GRANULE), prompt(4 * GRANULE)):
        admission, _ = enter(accounting, tokens)
        accounting.release_slot(admission.slot, tokens, len(tokens))
        # As after many sequences of whole blocks.
        accounting._preparation._recent.clear()
    for _ in range(SLOTS - 2):
        enter(accounting, prompt(4 * GRANULE))
    assert list(accounting.idle_slots) == [0, 1]
    assert accounting.granules.slots[1].view.cuts(1)
    admission, plan = enter(accounting, beginning + prompt(2 * GRANULE))
    assert (admission.slot, admission.cached) == (0, GRANULE)
    assert not shown(plan.ahead, 1)


def test_a_shared_beginning_stays_in_view():
    accounting = accounting_of()
    common = prompt(4 * GRANULE)
    kept = []
    for _ in range(2 * SLOTS):
        tokens = common + prompt(2 * GRANULE)
        admission, plan = enter(accounting, tokens)
        kept.append(admission.cached)
        beginnings = [view for view in plan.ahead if view.position < 4 and admission.cached]
        assert not beginnings, "the next slot shows what nobody needs where the shared beginning belongs"
        accounting.complete(len(kept))
        accounting.release_slot(admission.slot, tokens, len(tokens))
    assert kept[1:] == [4 * GRANULE] * (len(kept) - 1)


def test_nothing_is_prepared_where_views_do_not_last():
    spec = KvSpec((KvGroup((0,), 64),), GRANULE, 64, SLOTS, 64 * GRANULE)
    accounting = KvAccounting(spec, shares=False)
    for _ in range(SLOTS):
        _, plan = enter(accounting, prompt())
        assert not plan.ahead


def test_a_long_sequence_of_single_granules_prepares_for_a_bounded_one():
    accounting = accounting_of(6 * PREPARED_GRANULES)
    _, plan = enter(accounting, prompt(2 * PREPARED_GRANULES * GRANULE))
    assert 0 < sum(len(view.granules) for view in plan.ahead) <= PREPARED_SLOTS * PREPARED_GRANULES


def run(accounting: KvAccounting, length: int) -> MemoryPlan:
    """A sequence that comes and goes, with a plan for its step and one after it."""
    tokens = prompt(length)
    admission, plan = enter(accounting, tokens)
    accounting.release_slot(admission.slot, tokens, len(tokens))
    accounting.drain_ops()
    accounting.check()
    return plan


@pytest.mark.parametrize(("block", "split"), [(1, 0), (16, 1000)])
def test_slots_are_prepared_where_the_prompt_cache_has_all_memory(block, split):
    """Sequences come and go, long and short ones; what they wait for is only what none of those before them needed."""
    accounting = accounting_of(640, block, min(split, 640 // block))
    while accounting.cache.idle < 600:
        run(accounting, 9 * GRANULE)
    lengths = [random.randint(1, 9) for _ in range(40)]
    for number, length in enumerate(lengths):
        plan = run(accounting, length * GRANULE)
        waits = sum(len(view.granules) for view in plan.views)
        assert not waits or length > max(lengths[max(number - 8, 0) : number], default=9)
        assert accounting.pool.free <= 640 // KEPT_SHARE + PREPARED_SLOTS * 9, "more is free than is kept for the next"


def test_sequences_that_come_together_find_their_granules_each():
    accounting = accounting_of()
    enter(accounting, prompt())
    together = [accounting.admit(prompt(), LENGTH, 0) for _ in range(PREPARED_SLOTS)]
    plan = accounting.drain_ops()
    accounting.check()
    for admission in together:
        assert not shown(plan.views, admission.slot)


def test_slots_that_become_next_are_prepared_whatever_is_free():
    """One sequence comes as another one of its length goes: as many granules are free as before."""
    accounting = accounting_of()
    live: list[int] = []
    free = set()
    for number in range(3 * SLOTS):
        if number > 1:
            # Nothing of it stays cached.
            accounting.release_slot(live.pop(0))
        tokens = prompt()
        live.append(accounting.admit(tokens, len(tokens), 0).slot)
        accounting.drain_ops()
        accounting.check()
        free.add(accounting.pool.free)
        for each in itertools.islice(accounting._next_slots(), PREPARED_SLOTS):
            view = accounting.granules.slots[each].view.granules[:3]
            assert len(view) == 3
            assert all(map(accounting.pool.is_free, view))
    assert len(free) == 2
