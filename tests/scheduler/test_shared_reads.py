"""Decode rows that read their beginning once: who is grouped, when it pays, and what follows as rows come and go."""

import random

import pytest

from bladellm_runtime.kv.shared_reads import PrefixGroup, SharingRule
from tests.scheduler.fake_device import VOCAB, limits_of, spec_of
from tests.scheduler.simulator import Simulation

SYSTEM = [2 + i % 50 for i in range(16)]
RULE = SharingRule(members=4, least_rows=2, most_rows=8, step_tokens=1, group_tokens=1)


def simulation(rule=RULE, **how) -> Simulation:
    spec = spec_of(4, how.pop("num_granules", 200), 12, 64, how.pop("block", 1), how.pop("host", 0))
    return Simulation(limits_of(), spec, how.pop("depth", 1), sharing=rule, **how)


def ask(sim, *own, max_tokens=9, salt="", system=SYSTEM):
    return sim.add([*system, *own], max_tokens=max_tokens, salt=salt, ignore_eos=True)


def decode_plan(sim):
    """The next step of decode rows alone; it is completed."""
    while True:
        plan = sim.launch()
        sim.complete()
        if plan.num_decode == len(plan.slots):
            return plan


def test_rows_with_one_system_prompt_are_a_group():
    sim = simulation()
    ids = [ask(sim, 60, number) for number in range(3)]
    plan = decode_plan(sim)
    assert plan.prefixes == (PrefixGroup((0, 1, 2), 4),)
    assert decode_plan(sim).prefixes is plan.prefixes, "nothing changed"
    ask(sim, 61)
    assert decode_plan(sim).prefixes == (PrefixGroup((0, 1, 2, 3), 4),)
    sim.abort(ids[:1])
    assert decode_plan(sim).prefixes == (PrefixGroup((0, 1, 2), 4),)
    sim.abort(ids[1:])
    assert decode_plan(sim).prefixes == ()
    sim.finish()


def test_steps_with_prompts_have_no_groups():
    sim = simulation()
    for number in range(3):
        ask(sim, number)
    decode_plan(sim)
    ask(sim, 61)
    plan = sim.launch()
    assert plan.num_decode == 3 < len(plan.slots)
    assert plan.prefixes == ()
    sim.complete()
    sim.finish()


def test_salts_keep_rows_apart():
    sim = simulation()
    for number in range(6):
        ask(sim, number, salt="ab"[number % 2])
    assert set(decode_plan(sim).prefixes) == {PrefixGroup((0, 2, 4), 4), PrefixGroup((1, 3, 5), 4)}
    sim.finish()


def test_what_was_computed_twice_is_not_shared():
    """The second prompt asks for log-probabilities, which are computed anew."""
    sim = simulation()
    ask(sim, 5)
    sim.add([*SYSTEM, 6], max_tokens=9, ignore_eos=True, prompt_logprobs=1)
    assert decode_plan(sim).prefixes == ()
    sim.finish()


@pytest.mark.parametrize(
    ("change", "pays"),
    [
        ({}, True),
        ({"step_tokens": 32}, True),
        ({"step_tokens": 33}, False),
        ({"group_tokens": 32}, True),
        ({"group_tokens": 33}, False),
        ({"least_rows": 4}, False),
        ({"most_rows": 2}, False),
        ({"members": 2, "step_tokens": 17}, False),
    ],
)
def test_groups_are_there_where_they_pay(change, pays):
    """Three rows with 16 tokens in common; four may share a read, which saves 32 token reads."""
    values = {name: getattr(RULE, name) for name in RULE.__slots__} | change
    sim = simulation(SharingRule(**values))
    for number in range(3):
        ask(sim, number)
    assert bool(decode_plan(sim).prefixes) == pays
    sim.finish()


@pytest.mark.turns
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("options", [{}, {"num_granules": 32, "host": 20}, {"num_granules": 40, "block": 2}])
def test_random_traffic(depth, options):
    """Several system prompts, conversations that branch off, aborts, preemption, swap: the fake device checks that rows
    of a group show the same full granules."""
    rng = random.Random()
    rule = SharingRule(rng.choice([2, 3]), 2, 12, 1, 1)
    sim = simulation(rule, depth=depth, seed=rng.random(), **options)
    systems = [[rng.randrange(VOCAB) for _ in range(length)] for length in (8, 16, 23)]
    systems.append(systems[1] + [7] * 9)
    grouped = 0
    for _ in range(250):
        if rng.random() < 0.4:
            own = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 9))]
            ask(sim, *own, max_tokens=rng.randrange(1, 20), salt=rng.choice(["", "", "a"]), system=rng.choice(systems))
        if rng.random() < 0.05 and sim.live:
            sim.abort([rng.choice(sim.live)])
        if len(sim.device.in_flight) < depth and sim.scheduler.has_work:
            plan = sim.launch()
            grouped += bool(plan and plan.prefixes)
        if len(sim.device.in_flight) == depth or not sim.scheduler.has_work:
            sim.complete()
        sim.check()
    sim.finish()
    # Where memory is short, rows come and go with every step, and some runs have hardly a group.
    assert grouped > 5 or "host" in options
    for number in range(3):
        ask(sim, number)
    assert decode_plan(sim).prefixes
    sim.finish()
