"""The pool against a plain set of free granules."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bladellm_runtime.kv.granules import GranulePool, Unit
from bladellm_runtime.kv.slot_views import BlockClasses, SlotView

ACTIONS = st.lists(st.tuples(st.sampled_from(["take", "follow", "block", "give", "give"]), st.integers(0, 99)))


@settings(max_examples=300, deadline=None)
@given(granules=st.integers(1, 21), size=st.integers(1, 5), actions=ACTIONS)
def test_the_pool_hands_out_what_is_free_once(granules, size, actions):
    pool, free, units = GranulePool(granules, size), set(range(granules)), []
    for action, number in actions:
        whole = [b for b in range(granules // size) if free.issuperset(range(b * size, (b + 1) * size))]
        assert pool.free_blocks == len(whole)
        if action == "give" and units:
            unit = units.pop(number % len(units))
            pool.give(unit)
            free.update(unit.granules)
        elif action == "block":
            unit = pool.take_block(number % granules)
            assert (unit is None) == (not whole)
            if unit is not None:
                assert unit.count == size
                assert unit.first // size in whole
                assert unit.first == number % granules // size * size or number % granules // size not in whole
                free.difference_update(unit.granules)
                units.append(unit)
        elif action != "give" and free:
            wanted = number % granules
            unit = pool.take(wanted) if action == "take" else pool.take(after=wanted)
            assert unit.count == 1
            assert unit.first in free
            assert unit.first == wanted or action == "follow" or wanted not in free
            in_pieces = any(granule // size not in whole for granule in free)
            if action == "follow" or wanted not in free:
                assert not in_pieces or unit.first // size not in whole, "a whole block is broken without need"
            free.discard(unit.first)
            units.append(unit)
        assert pool.free == len(free)
        assert all(pool.is_free(granule) == (granule in free) for granule in range(granules))
        pool.check()


def test_granules_of_one_sequence_follow_each_other():
    pool = GranulePool(12, 4)
    first = pool.take()
    units = [first]
    for _ in range(3):
        units.append(pool.take(after=units[-1].first))
    assert sorted(unit.first for unit in units) == [0, 1, 2, 3]
    assert [b.first - a.first for a, b in itertools.pairwise(units)].count(1) >= 2


def test_an_empty_pool_says_so():
    pool = GranulePool(2, 2)
    assert pool.take_block() is not None
    assert pool.take_block() is None
    with pytest.raises(MemoryError, match="no free granule"):
        pool.take()


def test_check_finds_wrong_books():
    pool = GranulePool(6, 2)
    pool.take()
    pool.free += 1
    with pytest.raises(RuntimeError, match="contradict"):
        pool.check()


def test_a_view_lasts_until_its_block_changes_between_whole_and_pieces():
    classes = BlockClasses(8, 4)
    view, other = SlotView(classes), SlotView(classes)
    block = Unit(4, 4)
    classes.use(block)
    assert view.show(0, block)
    assert not view.show(0, block)
    assert view.at(2) == 6
    classes.use(Unit(5, 1))
    other.show(0, Unit(5, 1))
    assert view.at(2) is None
    assert other.at(0) == 5
    classes.use(block)
    assert other.at(0) is None
    assert view.at(2) is None, "whole again, but not the same memory"
    assert view.show(0, block)


def test_a_granule_alone_is_no_block():
    classes = BlockClasses(4, 1)
    view = SlotView(classes)
    view.show(0, Unit(2, 1))
    classes.use(Unit(2, 1))
    assert view.at(0) == 2
    assert not classes.is_whole(2)
    view.cut(0)
    assert view.at(0) is None
