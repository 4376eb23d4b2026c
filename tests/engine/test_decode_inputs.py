"""What captured decode steps read, sent from buffers that keep what does not change, against arrays made anew."""

import random
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from bladellm_runtime.engine.decode_inputs import DecodeInputs
from bladellm_runtime.scheduler.plan import StepPlan
from tests.support.step_plans import step_plan

SLOTS, GRANULE = 7, 4
SIZES = (2, 4, 7)


class Arena:
    """Numbers alone. Where it does not share, slots move now and then."""

    device = torch.device("cpu")
    spec = SimpleNamespace(num_slots=SLOTS, granule_tokens=GRANULE, max_tokens=1000)

    def __init__(self, shares: bool, table: bool, paged: bool) -> None:
        self.shares, self._layer = shares, SimpleNamespace(table=True if table else None, paged=paged)
        self.offset = 0

    def layer(self, index: int) -> SimpleNamespace:
        return self._layer

    def base_rows(self, slots: np.ndarray) -> np.ndarray:
        return 5000 * slots + self.offset

    def granule_rows(self, slots: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return 31 * slots + positions


KINDS = [(True, False, False), (True, True, False), (True, True, True), (False, False, False)]
"""Whether an arena shares, has a table, is paged."""


@pytest.mark.parametrize(("shares", "table", "paged"), KINDS)
def test_steps_are_sent_as_if_each_were_the_first(shares, table, paged):
    arena = Arena(shares, table, paged)
    inputs, plan = DecodeInputs(SIZES[-1], arena), None
    for step in range(300):
        if plan is None or random.random() < 0.2:
            plan = random_plan(step)
        plan.starts = np.array([random.randrange(900) for _ in plan.slots])
        size = random_size(plan)
        adapters = random_adapters(plan)
        if not shares and random.random() < 0.1:
            arena.offset = random.randrange(9)
        inputs._static.fill_(2**40)
        inputs.send(plan, size, adapters)
        assert_as_fresh(inputs, plan, size, adapters)
        if random.random() < 0.05:
            inputs.send(None, size)
            assert set(inputs.arrays(size).kv_lens.tolist()) == {0}


@pytest.mark.parametrize(("shares", "table", "paged"), KINDS)
def test_steps_of_the_same_rows_are_sent_once(shares, table, paged):
    """But where their next places are not the next numbers, or anything came between, or the step was not advanced."""
    inputs = DecodeInputs(SIZES[-1], Arena(shares, table, paged))
    plan, size, adapters, kept = random_plan(0), SIZES[-1], None, 0
    for step in range(400):
        further, last, size_before, adapters_before = 0, plan, size, adapters
        if random.random() < 0.8:
            further = random.choice((1,) * 9 + (0, 2, -1))
            plan = step_plan(step, num_decode=len(last.slots))
            plan.slots, plan.starts = last.slots, last.starts + further
        else:
            plan = random_plan(step)
        size = size if plan.slots is last.slots and random.random() < 0.9 else random_size(plan)
        adapters = adapters if plan.slots is last.slots and random.random() < 0.9 else random_adapters(plan)
        advanced = step > 0 and random.random() < 0.9
        if advanced:  # else the step before is sampled in another way
            inputs.advance(size_before)
            inputs.advanced()
        between = random.random() < 0.03
        if between:
            inputs.send(None, size)
        stays = further == 1 and size == size_before and adapters is None and adapters_before is None and advanced
        with mock.patch.object(inputs, "_upload", wraps=inputs._upload) as upload:
            inputs.send(plan, size, adapters)
        assert upload.called != (stays and shares and not table and not between)
        kept += not upload.called
        assert_as_fresh(inputs, plan, size, adapters)
    assert (kept > 50) == (shares and not table)


def test_what_rows_share_is_sent_when_it_changes():
    inputs, slots = DecodeInputs(4, Arena(True, False, False)), np.array([3, 1])
    groups, others = (object(),), (object(),)
    with mock.patch.object(inputs, "_pack", return_value=np.empty(0, np.int64)) as pack:
        for step, prefixes in enumerate((groups, groups, others, (), groups)):
            plan = step_plan(step, num_decode=2, prefixes=prefixes)
            plan.slots, plan.starts = slots, np.array([5, 8]) + step
            inputs.send(plan, 4)
            inputs.advance(4)
            inputs.advanced()
    assert [call.args[0] for call in pack.call_args_list] == [groups, others, groups]


def random_plan(step: int) -> StepPlan:
    slots = np.array(random.sample(range(SLOTS), random.randrange(1, SLOTS + 1)))
    plan = step_plan(step, num_decode=len(slots))
    plan.slots, plan.starts = slots, np.array([random.randrange(900) for _ in slots])
    return plan


def random_size(plan: StepPlan) -> int:
    return random.choice([size for size in SIZES if size >= len(plan.slots)])


def random_adapters(plan: StepPlan) -> np.ndarray | None:
    return np.array([random.randrange(-1, 3) for _ in plan.slots]) if random.random() < 0.3 else None


def assert_as_fresh(inputs: DecodeInputs, plan: StepPlan, size: int, adapters: np.ndarray | None) -> None:
    fresh = DecodeInputs(SIZES[-1], inputs._arena)
    fresh._static.fill_(2**40)
    fresh.send(plan, size, adapters)
    arrays, rows = inputs.arrays(size), len(plan.slots)
    for name in arrays._fields if adapters is not None else arrays._fields[:-1]:
        assert torch.equal(getattr(arrays, name), getattr(fresh.arrays(size), name)), name
    assert arrays.positions.tolist() == [*plan.starts, *[0] * (size - rows)]
    assert arrays.kv_lens.tolist() == [*plan.starts + 1, *[0] * (size - rows)]
    assert arrays.sampling_slots.tolist() == [*plan.slots, *[-1] * (size - rows)]
    assert arrays.slots.tolist() == [*plan.slots, *[SLOTS] * (size - rows)]
