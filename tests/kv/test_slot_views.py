"""What slots show, what is mapped ahead, and who gets whole blocks: directed cases."""

import random

import pytest

from tests.kv.paper_engine import Engine, prompt, shows
from tests.kv.test_accounting import spec_of


def test_what_is_mapped_ahead_goes_to_who_needs_it():
    engine = Engine(spec_of(4, 10, 2, 10))
    first = engine.admit(prompt(4), room=4)
    engine.accounting.map_ahead(first.slot, 2)
    assert engine.accounting.granules.ahead == 1
    assert [show.granules for show in engine.step().ahead if show.slot == first.slot] == [
        [engine.accounting.granules.slots[first.slot].view.at(1)]
    ]
    assert (engine.accounting.used, engine.accounting.available()) == (1, 9)
    second = engine.accounting.admit(prompt(36, 1), 36, 0)
    assert second is not None
    assert (engine.accounting.available(), engine.accounting.granules.ahead) == (0, 0)
    assert not engine.accounting.grow(first.slot, 5)


@pytest.mark.parametrize("drained", [True, False])
def test_what_is_mapped_ahead_needs_no_view_when_it_is_used(drained):
    engine = Engine(spec_of(4, 10, 2, 10))
    slot = engine.admit(prompt(4), room=4).slot
    engine.accounting.map_ahead(slot, 2)
    if drained:
        engine.step()
    assert engine.accounting.grow(slot, 5)
    plan = engine.step()
    assert not [show for show in plan.ahead if show.slot == slot]
    assert (len(shows(plan)) == 0) == drained


def test_a_slot_does_not_count_on_a_view_that_was_to_come_later():
    """A sequence leaves before the plan that maps a granule ahead for it is drained, and another takes its slot."""
    engine = Engine(spec_of(4, 10, 1, 10), prompt_cache=False)
    slot = engine.admit(prompt(4), room=4).slot
    engine.step()
    engine.accounting.map_ahead(slot, 2)
    engine.release(slot)
    engine.admit(prompt(12, 1))
    plan = engine.step()
    assert sum(len(show.granules) for show in shows(plan)) == 2
    assert not plan.ahead


def test_a_granule_is_not_taken_from_a_whole_block_that_a_slot_showed():
    engine = Engine(spec_of(4, 32, 2, 10, block=4), prompt_cache=False)
    slot = engine.admit(prompt(16)).slot
    other = engine.admit(prompt(3, 1)).slot
    engine.step()
    engine.release(slot)
    assert engine.admit(prompt(3, 2)).slot == slot
    engine.step()
    assert engine.memory.granule(slot, 0) // 4 == engine.memory.granule(other, 0) // 4
    assert engine.accounting.pool.free_blocks == 7


def test_nothing_is_mapped_ahead_early_without_memory_or_beyond_the_end():
    engine = Engine(spec_of(8, 10, 2, 3))
    slot = engine.admit(prompt(8), room=8).slot
    engine.accounting.map_ahead(slot, 3)
    assert engine.accounting.granules.ahead == 0
    engine.accounting.grow(slot, 24)
    engine.accounting.map_ahead(slot, 24)
    assert engine.accounting.granules.ahead == 0
    full = Engine(spec_of(8, 8, 3, 8))
    slots = [full.admit(prompt(length, length), room=length).slot for length in (24, 32)]
    for slot, tokens in zip(slots, (24, 32), strict=True):
        full.accounting.map_ahead(slot, tokens)
        assert (full.accounting.granules.ahead, full.accounting.available()) == (1, 1)


def test_without_a_cache_a_slot_takes_the_granules_it_shows():
    engine = Engine(spec_of(4, 20, 4, 10), prompt_cache=False)
    first = engine.serve(prompt(30, 1))
    assert engine.accounting.pool.free == 20
    second = engine.admit(prompt(30, 2))
    assert second.slot == first.slot
    assert shows(engine.step()) == []


def test_long_prompts_get_whole_blocks_in_a_full_cache():
    engine = Engine(spec_of(4, 400, 6, 100, block=8))
    draw = random.Random(0)
    whole = total = 0
    for seed in range(200):
        engine.admit(prompt(draw.choice([13, 100, 200, 300]), seed))
        for other in list(engine.live):
            engine.append(other, prompt(draw.randrange(1, 9), seed))
        found = shows(engine.step())
        if seed >= 50:
            whole += sum(len(show.granules) for show in found if show.whole)
            total += sum(len(show.granules) for show in found)
        if len(engine.live) == 4:
            engine.release(draw.choice(list(engine.live)))
    assert engine.accounting.pool.free < 80
    assert whole > 0.7 * total, "pieces take over the pool"
