"""Random requests, aborts, steps in flight and tiny memories: the plans stay correct and every answer the same."""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bladellm_runtime.scheduler.late_prompts import FirstTokenTarget
from bladellm_runtime.scheduler.prefill_budget import StepBound
from bladellm_runtime.scheduler.step_cost import StepCost
from bladellm_runtime.wire.messages import RequestDelta
from tests.scheduler.fake_device import VOCAB, limits_of, spec_of
from tests.scheduler.simulator import Simulation
from tests.support.cases import drawn_of

prompts = st.one_of(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=24), st.lists(st.integers(2, 3), min_size=1, max_size=24)
)
salts = st.sampled_from(["", "", "a"])
max_tokens = st.one_of(st.none(), st.integers(0, 40))
few_ids = st.lists(st.integers(0, VOCAB - 1), max_size=2).map(tuple)
TICKS = StepCost(step=1000.0, token=200.0, decode_row=0.0, decode_kv=1.0, prefill_pair=1.0)
"""Milliseconds, about as the simulation's clock goes."""
maybe_count = st.sampled_from([None, None, 0, 2])


class SchedulerMachine(RuleBasedStateMachine):
    """The engine loop in any order it could take, against the fake device."""

    @initialize(
        granule_tokens=st.integers(1, 5),
        num_granules=st.integers(2, 16),
        num_slots=st.integers(1, 5),
        max_batch_tokens=st.integers(1, 16),
        prefill_chunk_tokens=st.integers(1, 16),
        max_model_len=st.integers(4, 48),
        block=st.sampled_from([1, 2, 4]),
        host=st.sampled_from([0, 3, 20]),
        memory=st.fixed_dictionaries(
            {"shares": st.booleans(), "prompt_cache": st.booleans(), "background": st.booleans(), "seed": st.integers()}
        ),
        depth=st.integers(1, 2),
        groups=st.sampled_from([1, 1, 2, 3]),
        in_time=st.sampled_from([None, None, 0.5, 4.0, 20.0]),
        bound=st.sampled_from([None, None, 900.0, 1600.0, 3000.0]),
        sizes=st.sampled_from([(), (2, 3, 5, 9), (4, 16)]),
    )
    def start(
        self,
        granule_tokens,
        num_granules,
        num_slots,
        block,
        host,
        memory,
        depth,
        groups,
        in_time,
        bound,
        sizes,
        max_model_len,
        **most,
    ):
        spec = spec_of(granule_tokens, num_granules, num_slots, max_model_len, block, host)
        self.sim = Simulation(limits_of(max_model_len=max_model_len, **most), spec, depth, groups=groups, **memory)
        cost = replace(TICKS, sizes=sizes)
        self.sim.scheduler.bound_steps(
            None if bound is None else StepBound(bound, cost),
            None if in_time is None else FirstTokenTarget(in_time, cost),
        )

    @rule(
        prompt=prompts,
        max_tokens=max_tokens,
        min_tokens=st.integers(0, 3),
        stop_token_ids=few_ids,
        ignore_eos=st.booleans(),
        logprobs=maybe_count,
        prompt_logprobs=maybe_count,
        seed=st.sampled_from([None, 0]),
        salt=salts,
    )
    def add(self, prompt, max_tokens, min_tokens, **params):
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        self.sim.add(prompt, max_tokens=max_tokens, min_tokens=min_tokens, **params)

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data(), more=st.lists(st.integers(2, 3), max_size=6), max_tokens=max_tokens)
    def add_next_turn(self, data, more, max_tokens):
        """A conversation goes on: a prompt that begins with an earlier request and what it got."""
        earlier = self.sim.requests[data.draw(st.sampled_from(sorted(self.sim.requests)))]
        tokens = earlier.prompt + self.sim.tokens(earlier.request_id)
        keep = data.draw(st.integers(0, len(tokens)))
        self.sim.add(tokens[:keep] + more, max_tokens=max_tokens, salt=earlier.cache_salt)

    @rule()
    def reset(self):
        if not self.sim.device.in_flight:
            self.sim.scheduler.reset_prompt_cache()

    @rule(sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(8, 40)), min_size=2, max_size=6))
    def add_crowd(self, sizes):
        for length, max_tokens in sizes:
            prompt = [(7 * len(self.sim.requests) + i) % VOCAB for i in range(length)]
            self.sim.add(prompt, max_tokens=max_tokens, ignore_eos=True)

    @rule(prompt=st.sampled_from([[], [VOCAB], [3, -1], [2] * 49]))
    def add_impossible(self, prompt):
        assert self.sim.add(prompt) not in self.sim.live

    @precondition(lambda self: self.sim.requests)
    @rule(data=st.data())
    def abort(self, data):
        ids = st.integers(-1, len(self.sim.requests))
        self.sim.abort(data.draw(st.lists(ids, min_size=1, max_size=3, unique=True)))

    @rule()
    def launch(self):
        self.sim.launch()

    @rule()
    def complete(self):
        self.sim.complete()

    @rule(count=st.integers(1, 30))
    def steps(self, count):
        for _ in range(count):
            self.sim.step()
            self.sim.check()

    @invariant()
    def consistent(self):
        if hasattr(self, "sim"):
            self.sim.check()

    def teardown(self):
        if hasattr(self, "sim"):
            self.sim.finish()


quick = settings(max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = quick


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestSchedulerLong(SchedulerMachine.TestCase):
    settings = settings(quick, max_examples=1000, stateful_step_count=50, report_multiple_bugs=False)


def run_workload(
    seed: int, depth: int, *, granules: int, budget: int, chunk: int, groups: int = 1
) -> tuple[list[list[RequestDelta]], int]:
    """Requests that arrive over time; returns what each got, and the preemptions it took."""
    draw = random.Random(seed)
    sim = Simulation(limits_of(budget, chunk, 60), spec_of(3, granules, 6, 60), depth, groups=groups)
    for _ in range(12):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 20))]
        sim.add(prompt, max_tokens=draw.randint(1, 30), ignore_eos=draw.random() < 0.7, logprobs=0, prompt_logprobs=0)
        for _ in range(draw.randint(0, 3)):
            sim.step()
            sim.check()
    sim.finish()
    return [sim.deltas[i] for i in sim.requests], sim.scheduler.stats(0.0).preemptions


def streams(answers: list[list[RequestDelta]]) -> list[list[tuple]]:
    return [[(d.tokens, d.finish, d.error, d.logprobs, d.prompt_logprobs) for d in deltas] for deltas in answers]


@pytest.mark.turns
@pytest.mark.parametrize("seed", drawn_of(range(12), 5))
def test_overlap_chunks_and_preemption_do_not_change_a_stream(seed):
    plain, preemptions = run_workload(seed, depth=1, granules=1000, budget=1000, chunk=1000)
    assert preemptions == 0
    total = 0
    for depth in (1, 2, 3):
        for budget, chunk in ((1000, 1000), (7, 1000), (1000, 2), (3, 3), (1, 1)):
            crowded, preemptions = run_workload(seed, depth, granules=20, budget=budget, chunk=chunk)
            assert streams(crowded) == streams(plain)
            total += preemptions
    assert total > 0, "the memory was meant to be too small"
