"""Which tokens a pipeline's first stage waits for: all that a step reads, and none that nobody could have sent. How
stages of different sizes agree on their memory."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from bladellm_kernels.kv_format import KV_FORMATS

from bladellm_runtime.config import EngineArgs
from bladellm_runtime.engine import memory
from bladellm_runtime.engine.stage import TokenOrder
from bladellm_runtime.kv.arena import KvShape
from bladellm_runtime.models.config import read_model_spec
from bladellm_runtime.models.stages import Stages
from bladellm_runtime.scheduler.plan import StepPlan
from tests.support.step_plans import step_plan


def random_plan(step: int, slots: int, sampled: dict[int, int]) -> StepPlan:
    """Decode rows of slots that have a token, and prefill chunks of others."""
    rows = random.sample(range(slots), random.randint(1, slots))
    decodes = [slot for slot in rows if slot in sampled and random.random() < 0.7]
    chunks = [slot for slot in rows if slot not in decodes]
    samples = [True] * len(decodes) + [random.random() < 0.5 for _ in chunks]
    return step_plan(step, slots=decodes + chunks, samples=samples, num_decode=len(decodes))


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
        dues.append(order.due(step_plan(step, slots=[slot], samples=[True], num_decode=int(step > 2))))
    assert dues == [0, 0, *range(1, 7)]


@pytest.mark.parametrize("page", [1, 4096, 2 << 20])
def test_all_stages_have_the_same_granules_within_their_budgets(page, demo_model, monkeypatch):
    monkeypatch.setattr(memory, "page_bytes", lambda kind, device: page)
    monkeypatch.setattr(memory, "block_bytes", lambda kind: 16 * page)
    whole, cpu = read_model_spec(demo_model), torch.device("cpu")
    for _ in range(30):
        counts = [random.randint(1, 13) for _ in range(random.randint(1, 5))]
        borders = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
        layers = tuple(range(*pair) for pair in pairwise(borders))
        shape = KvShape(random.choice([1, 2, 8]), 64, torch.bfloat16, random.choice(list(KV_FORMATS.values())))
        budget = random.randint(1 << 26, 1 << 28)
        args = EngineArgs(model="m", prompt_cache_enable_swap=True, prompt_cache_swap_gib=0.25)
        made = []
        for count in counts:
            stages = Stages(replace(whole, layers=count), layers)
            made.append(memory.make_kv_spec(args, stages, shape, cpu, 4096, budget * count))
            assert [layer for group in made[-1].groups for layer in group.layers] == list(range(count))
            assert made[-1].num_granules * made[-1].granule_bytes <= budget * count
            assert made[-1].host_granules * made[-1].granule_bytes <= 0.25 * 2**30
            assert all(made[-1].granule_tokens * group.token_bytes % page == 0 for group in made[-1].groups)
        assert len({replace(spec, groups=(), scale_token_bytes=0) for spec in made}) == 1
