"""Long random traffic with conversations over a small memory: all that the prompt cache does happens."""

import random
from collections import Counter

import pytest

from bladellm_runtime.kv.operations import Copy, Show, SwapIn, SwapOut
from bladellm_runtime.request import FinishReason
from tests.scheduler.fake_device import VOCAB, limits_of, spec_of
from tests.scheduler.simulator import Simulation


class Traffic:
    """Requests as they come: with a known beginning, as next turns of conversations, to fail or to be aborted."""

    def __init__(self, sim: Simulation, seed: int) -> None:
        self.sim = sim
        self.random = random.Random(seed)
        self.beginnings = [self.tokens(length) for length in (5, 17, 40)]
        self.ended: list[int] = []
        self.events: Counter[str] = Counter()

    def tokens(self, count: int) -> list[int]:
        return [self.random.randrange(2, VOCAB) for _ in range(count)]

    def add(self) -> None:
        draw = self.random
        salt = draw.choice(["", "", "a"])
        prompt = draw.choice(self.beginnings) + self.tokens(draw.randint(1, 12))
        if self.ended and draw.random() < 0.4:
            last = self.sim.requests[draw.choice(self.ended[-10:])]
            salt, prompt = last.cache_salt, last.prompt + self.sim.tokens(last.request_id) + self.tokens(3)
        scores = 1 if draw.random() < 0.05 else None
        self.sim.add(
            prompt[: self.sim.limits.max_model_len - 8],
            max_tokens=draw.randint(0, 48),
            salt=salt,
            ignore_eos=draw.random() < 0.7,
            seed=draw.choice([None, None, None, 0]),
            prompt_logprobs=scores,
        )

    def step(self) -> None:
        sim, draw = self.sim, self.random
        if len(sim.live) < 9 and draw.random() < 0.5:
            self.add()
        if sim.live and draw.random() < 0.03:
            sim.abort([draw.choice(sim.live)])
        plan = sim.launch()
        if plan is not None:
            self.count(plan)
        if plan is None or len(sim.device.in_flight) == sim.depth or draw.random() < 0.3:
            for delta in sim.complete():
                if delta.finish is not None and delta.error is None:
                    self.ended.append(delta.request_id)
                self.events["failed"] += delta.finish is FinishReason.ERROR

    def count(self, plan) -> None:
        memory, events = plan.memory, self.events
        shows = [view for view in memory.views if isinstance(view, Show)]
        events["shows"] += len(shows)
        events["whole"] += sum(show.whole for show in shows)
        events["ahead"] += len(memory.ahead)
        for kind in (Copy, SwapIn, SwapOut):
            events[kind.__name__] += sum(isinstance(move, kind) for move in memory.moves)
        events["hits"] += sum(plan.starts[plan.slots == load.slot][0] > 0 for load in plan.loads)


def soak(steps: int, seed: int, depth: int, block: int, granules: int) -> Counter[str]:
    print(f"seed {seed}")
    spec = spec_of(6, granules, 6, 96, block, host=24)
    sim = Simulation(limits_of(24, 16, 96), spec, depth, background=random.Random(seed).random() < 0.5, seed=seed)
    traffic = Traffic(sim, seed)
    for step in range(steps):
        traffic.step()
        if step % 5 == 0:
            sim.check()
    sim.finish()
    sim.scheduler.reset_prompt_cache()
    assert sim.memory.pool.free == spec.num_granules
    assert sim.memory.swap.used == 0
    assert list(sim.memory.cache.nodes()) == []
    traffic.events["preempted"] = sim.scheduler.stats(0.0).preemptions
    return traffic.events


@pytest.mark.parametrize(("depth", "block", "granules"), [(1, 1, 36), (2, 1, 40), (2, 4, 45)])
def test_traffic(depth, block, granules):
    events = soak(400, seed=random.randrange(10**6), depth=depth, block=block, granules=granules)
    for event in ("shows", "hits", "Copy", "SwapOut"):
        assert events[event], f"no {event}: the traffic was meant to bring them about"


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "block", "granules"), [(1, 1, 36), (2, 1, 40), (2, 4, 45), (2, 8, 48)])
def test_traffic_for_long(depth, block, granules):
    events = soak(10_000, seed=random.randrange(10**6), depth=depth, block=block, granules=granules)
    for event in ("shows", "ahead", "hits", "Copy", "SwapOut", "SwapIn", "failed", "preempted"):
        assert events[event], f"no {event}: the traffic was meant to bring them about"
    assert events["whole"] or block == 1
