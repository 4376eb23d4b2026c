"""Which tokens a pipeline's first stage waits for: all that a step reads, and none that nobody could have sent."""

import random

from bladellm_runtime.engine.stage import TokenOrder
from bladellm_runtime.scheduler.plan import StepPlan


def random_plan(step: int, slots: int, sampled: dict[int, int]) -> StepPlan:
    """Decode rows of slots that have a token, and prefill chunks of others."""
    rows = random.sample(range(slots), random.randint(1, slots))
    decodes = [slot for slot in rows if slot in sampled and random.random() < 0.7]
    chunks = [slot for slot in rows if slot not in decodes]
    samples = [True] * len(decodes) + [random.random() < 0.5 for _ in chunks]
    return StepPlan(step, slots=decodes + chunks, samples=samples, num_decode=len(decodes))


def test_the_first_stage_has_every_token_that_a_step_reads():
    for _ in range(50):
        in_flight, slots = random.randint(1, 6), random.randint(1, 7)
        order, sampled, last = TokenOrder(slots, in_flight), {}, 0
        for step in range(1, 60):
            plan = random_plan(step, slots, sampled)
            due = order.due(plan)
            # Sent already, or by a step that needs nothing of this one: no two stages wait for each other.
            assert due < step
            assert all(sampled[slot] <= max(due, last) for slot in plan.slots[: plan.num_decode])
            # Never more messages on their way than steps in flight.
            last = max(last, due)
            assert step - last <= in_flight
            for slot, samples in zip(plan.slots, plan.samples, strict=True):
                if samples:
                    sampled[slot] = step


def test_a_step_of_other_rows_waits_for_none():
    order = TokenOrder(4, in_flight=3)
    dues = []
    for step in range(1, 9):
        slot = step % 2
        dues.append(order.due(StepPlan(step, slots=[slot], samples=[True], num_decode=int(step > 2))))
    assert dues == [0, 0, *range(1, 7)]
