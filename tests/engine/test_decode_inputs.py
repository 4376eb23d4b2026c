"""What captured decode steps read, sent from buffers that keep what does not change, against arrays made anew."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bladellm_runtime.engine.decode_inputs import DecodeInputs
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


@pytest.mark.parametrize(
    ("shares", "table", "paged"), [(True, False, False), (True, True, False), (True, True, True), (False, False, False)]
)
def test_steps_are_sent_as_if_each_were_the_first(shares, table, paged):
    arena = Arena(shares, table, paged)
    inputs, plan = DecodeInputs(SIZES[-1], arena), None
    for step in range(300):
        if plan is None or random.random() < 0.2:
            slots = np.array(random.sample(range(SLOTS), random.randrange(1, SLOTS + 1)))
            plan = step_plan(step, num_decode=len(slots))
            plan.slots = slots
        plan.starts = np.array([random.randrange(900) for _ in plan.slots])
        size = random.choice([size for size in SIZES if size >= len(plan.slots)])
        adapters = np.array([random.randrange(-1, 3) for _ in plan.slots]) if random.random() < 0.3 else None
        if not shares and random.random() < 0.1:
            arena.offset = random.randrange(9)
        fresh = DecodeInputs(SIZES[-1], arena)
        for each in (inputs, fresh):
            each._static.fill_(2**40)
            each.send(plan, size, adapters)
        names = inputs.arrays(size)._fields if adapters is not None else inputs.arrays(size)._fields[:-1]
        for name in names:
            assert torch.equal(getattr(inputs.arrays(size), name), getattr(fresh.arrays(size), name)), name
        arrays, rows = inputs.arrays(size), len(plan.slots)
        assert arrays.positions.tolist() == [*plan.starts, *[0] * (size - rows)]
        assert arrays.kv_lens.tolist() == [*plan.starts + 1, *[0] * (size - rows)]
        assert arrays.sampling_slots.tolist() == [*plan.slots, *[-1] * (size - rows)]
        assert arrays.slots.tolist() == [*plan.slots, *[SLOTS] * (size - rows)]
        if random.random() < 0.05:
            inputs.send(None, size)
            assert set(inputs.arrays(size).kv_lens.tolist()) == {0}
