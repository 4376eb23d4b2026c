"""A full step lets the next request in without a row of it: its memory is mapped while the step runs."""

from bladellm_runtime.request import FinishReason
from tests.scheduler.test_planning import endless, rows, simulation


def shown(views, slot: int) -> list[int]:
    return [granule for view in views if view.slot == slot for granule in view.granules]


def let_in(sim, plan) -> set[int]:
    """Slots mapped ahead for a sequence: not the next one, which is prepared for none yet."""
    return {view.slot for view in plan.memory.ahead} - set(sim.memory.idle_slots)


def test_the_next_request_is_mapped_ahead_and_loaded_with_its_first_rows():
    sim = simulation(max_batch_tokens=8)
    for length in (8, 6, 5):
        endless(sim, length, 4)
    first = sim.launch()
    assert rows(first) == [(0, 8, True)]
    assert [load.choice for load in first.loads] == [0]
    (ahead,) = let_in(sim, first)
    assert ahead not in first.slots
    # Six tokens of the prompt and the first of the answer.
    assert len(shown(first.memory.ahead, ahead)) == 2
    sim.complete()
    second = sim.launch()
    assert second.loads[0].slot == ahead
    assert not shown(second.memory.views, ahead)
    sim.complete()
    sim.finish()


def test_only_one_request_waits_with_memory():
    sim = simulation(max_batch_tokens=4, num_granules=40)
    for _ in range(6):
        endless(sim, 12, 3)
    while not sim.scheduler.idle:
        sim.launch()
        assert sum(not seq.loaded for seq in sim.scheduler._roster.prefilling) <= 1
        sim.complete()


def test_a_request_that_leaves_before_its_first_row_gives_its_memory_back_after_the_step():
    sim = simulation(max_batch_tokens=8)
    endless(sim, 8, 4)
    second = endless(sim, 6, 4)
    plan = sim.launch()
    (slot,) = let_in(sim, plan)
    held = sim.memory.used
    deltas = sim.abort([second])
    assert deltas is None or [delta.finish for delta in deltas] == [FinishReason.ABORT]
    assert sim.memory.used == held, "memory was given away under a step in flight"
    sim.complete()
    assert sim.memory.used < held
    assert slot in sim.memory.idle_slots
    sim.finish()


def test_nothing_is_let_in_ahead_where_there_is_no_room():
    sim = simulation(max_batch_tokens=8, num_granules=4)
    endless(sim, 8, 4)
    endless(sim, 8, 4)
    plan = sim.launch()
    assert not let_in(sim, plan)
    assert len(sim.scheduler._roster.waiting) == 1
    sim.complete()
    sim.finish()
