"""Scheduler, accounting and real arenas together: every row finds exactly its own sequence's tokens in memory."""

import random
import time
import zlib

import numpy as np
import pytest

from bladellm_runtime.engine.core import EngineCore
from bladellm_runtime.kv.accounting import KvAccounting
from bladellm_runtime.kv.operations import Rows
from bladellm_runtime.request import SamplingParams
from bladellm_runtime.scheduler.limits import SchedulerLimits
from bladellm_runtime.scheduler.plan import StepPlan, StepResult
from bladellm_runtime.scheduler.scheduler import Scheduler
from bladellm_runtime.wire.messages import AddRequest
from tests.kv.arena_cases import KINDS, Geometry, integers, layers, pattern, payload_rows
from tests.support.step_results import step_result

VOCAB = 40
GEOMETRY = Geometry(num_layers=2, kv_heads=1, head_dim=16, num_slots=5, blocks=5, block_granules=2, max_granules=10)


def stamp(tokens: list[int]) -> int:
    """What the last of these tokens is stored as: it depends on all before it."""
    return zlib.crc32(bytes(tokens)) % 30_000 + 1


class ContentRunner:
    """Writes each token's stamp through the arena, and checks all that are before it."""

    def __init__(self, arena) -> None:
        self.arena = arena
        self.tokens: dict[int, list[int]] = {}
        self.cached = 0

    def launch(self, plan: StepPlan) -> StepResult:
        self.arena.submit(plan.memory, Rows(plan.slots, plan.starts, plan.query_lens))
        self.arena.wait()
        self.arena.move(plan.memory.moves)
        starts = {load.slot: int(plan.starts[plan.slots == load.slot][0]) for load in plan.loads}
        self.cached += sum(starts.values())
        self.tokens |= {load.slot: load.ids().tolist() for load in plan.loads}
        rows = [self.run(plan, row) for row in range(len(plan.slots))]
        return step_result(rows)

    def run(self, plan: StepPlan, row: int) -> int | None:
        slot, start, end = plan.slots[row], plan.starts[row], plan.starts[row] + plan.query_lens[row]
        tokens = self.tokens[slot]
        stamps = np.array([stamp(tokens[: position + 1]) for position in range(end)])
        for index, kv in enumerate(layers(self.arena)):
            payload = integers(kv.payload)
            wanted = pattern(stamps, index, payload.shape[1:], payload.dtype)
            found = payload[payload_rows(self.arena, kv, slot, 0, start)]
            assert found.equal(wanted[:start]), f"step {plan.step}: slot {slot} has other tokens before {start}"
            payload[payload_rows(self.arena, kv, slot, start, end - start)] = wanted[start:]
        if not plan.samples[row]:
            return None
        tokens.append(stamp(tokens[:end]) % VOCAB)
        return tokens[-1]

    def collect(self, launched: StepResult) -> StepResult:
        return launched

    def add_stats(self, stats) -> None: ...

    def close(self) -> None: ...


@pytest.mark.turns
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_find_their_own_tokens_whatever_is_shared_copied_evicted_and_swapped(kind, overlap):
    rng = random.Random()
    arena = GEOMETRY.arena(kind)
    spec = arena.spec
    memory = KvAccounting(spec, shares=arena.shares, sticky=arena.sticky, progress=arena if arena.background else None)
    limits = SchedulerLimits(2 * spec.granule_tokens, 2 * spec.granule_tokens, spec.max_tokens, frozenset(), VOCAB)
    runner = ContentRunner(arena)
    core = EngineCore(Scheduler(limits, memory), runner, overlap=overlap)
    beginnings = [[rng.randrange(VOCAB) for _ in range(5 * spec.granule_tokens)] for _ in range(3)]
    for request in range(60):
        prompt = rng.choice(beginnings)[: rng.randint(1, 5 * spec.granule_tokens)]
        prompt = prompt + [rng.randrange(VOCAB) for _ in range(rng.randint(1, spec.granule_tokens))]
        params = SamplingParams(max_tokens=rng.randint(1, 3 * spec.granule_tokens), ignore_eos=True)
        core.add(AddRequest(request, prompt, params, 0, time.monotonic()))
        for _ in range(rng.randint(0, 12)):
            core.step()
        if rng.random() < 0.1:
            core.abort([rng.randrange(request + 1)])
    while not core.idle:
        core.step()
    core.check()
    core.reset_prompt_cache()
    assert memory.pool.free == spec.num_granules
    assert (runner.cached > 0) == arena.shares
    arena.close()
