"""Far more requests than a small memory holds, with swap and several steps in flight: all that is recomputed costs less
than serving one request after the other."""

import random

import pytest

from tests.scheduler.fake_device import VOCAB, limits_of, spec_of
from tests.scheduler.simulator import Simulation

PREEMPTIONS = 2
"""For each request; 1.25 was the most."""


def tight(draw: random.Random, depth: int, groups: int) -> Simulation:
    """Pools of 8 to 24 granules, as many on the host or three times that, for up to 10 sequences at once."""
    granules, tokens = draw.choice([8, 16, 24]), draw.choice([1, 2, 4])
    longest = min(granules * tokens, draw.choice([24, 48, 96]))
    host = draw.choice([0, granules // 2, granules, 3 * granules])
    spec = spec_of(tokens, granules, draw.randint(2, 10), longest, draw.choice([1, 2, 4]), host)
    limits = limits_of(draw.choice([8, 16, 64]), draw.choice([4, 16, 64]), longest)
    return Simulation(limits, spec, depth, groups=groups)


def crowd(sim: Simulation, draw: random.Random) -> int:
    """Requests that share beginnings, and come faster than they can be served; returns the steps meanwhile."""
    longest = sim.limits.max_model_len
    beginnings = [[draw.randrange(2, VOCAB) for _ in range(longest // 2)] for _ in range(3)]
    steps = 0
    for _ in range(draw.randint(4, 25)):
        prompt = draw.choice(beginnings)[: draw.randint(1, longest // 2)]
        prompt = prompt + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 4))]
        sim.add(prompt, max_tokens=draw.randint(1, max(1, longest - len(prompt))), ignore_eos=True)
        for _ in range(draw.choice([0, 0, 1, 5])):
            sim.step()
            steps += 1
    return steps


def steps_alone(sim: Simulation) -> int:
    """What the requests take one after the other, each with what it takes to fill the steps in flight. One alone is in
    the steps of its own micro-batch only."""
    chunk = min(sim.limits.max_batch_tokens, sim.limits.prefill_chunk_tokens)
    chunks = sum(-(-len(request.prompt) // chunk) for request in sim.requests.values())
    answers = sum(len(sim.tokens(number)) for number in sim.requests)
    return sim.groups * (answers + chunks) + len(sim.requests) * (sim.depth + 1)


@pytest.mark.turns
@pytest.mark.parametrize(("depth", "groups"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("cases", [15, pytest.param(400, marks=pytest.mark.slow)])
def test_a_crowd_is_served_in_bounded_steps(depth, groups, cases):
    most = 0.0
    for _ in range(cases):
        seed = random.randrange(10**9)
        draw = random.Random(seed)
        sim = tight(draw, depth, groups)
        steps = crowd(sim, draw) + sim.finish()
        preemptions = sim.scheduler.stats(0.0).preemptions
        assert steps <= steps_alone(sim), f"seed {seed}"
        assert preemptions <= PREEMPTIONS * len(sim.requests), f"seed {seed}"
        most = max(most, preemptions / len(sim.requests))
    assert most > 0, "the memory was meant to be too small"
