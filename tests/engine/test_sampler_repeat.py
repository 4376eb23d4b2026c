"""A seed gives the same tokens whatever runs beside it, wherever it runs; a slot gives nothing away."""

import random
from dataclasses import replace

import numpy as np
import torch

from bladellm_runtime.request import SamplingParams
from tests.engine.sampler_support import Engine, Request, made_up_logits, random_params
from tests.kernels.sampling_support import fresh_seed
from tests.support.step_plans import step_plan

VOCAB = 907


def generate_alone(request: Request, tokens: int, slot: int = 0) -> list[int]:
    engine, copy = Engine(slot + 1, VOCAB), replace(request, output=[])
    engine.load(slot, copy)
    for _ in range(tokens):
        engine.sample([(slot, copy)], made_up_logits(copy, VOCAB)[None])
    return copy.output


def random_requests(rng: random.Random, count: int) -> list[Request]:
    return [
        Request([rng.randrange(VOCAB) for _ in range(rng.randint(1, 9))], random_params(rng, VOCAB), rng.randrange(3))
        for _ in range(count)
    ]


def test_tokens_do_not_depend_on_batch_slot_order_or_preemption():
    rng = random.Random(fresh_seed())
    requests = random_requests(rng, 14)
    expected = [generate_alone(request, 12, slot=rng.randrange(5)) for request in requests]
    engine, slots = Engine(20, VOCAB), rng.sample(range(20), 14)
    for slot, request in zip(slots, requests, strict=True):
        engine.load(slot, request)
    while unfinished := [index for index, request in enumerate(requests) if len(request.output) < 12]:
        for index in unfinished:
            if rng.random() < 0.1:
                slots[index] = rng.choice([slot for slot in range(20) if slot not in slots])
                engine.load(slots[index], requests[index])
        picked = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        rows = [(slots[index], requests[index]) for index in picked]
        engine.sample(rows, torch.stack([made_up_logits(request, VOCAB) for _, request in rows]))
    assert [request.output for request in requests] == expected


def test_position_counts_not_how_a_prompt_was_cut_into_chunks():
    params, logits = SamplingParams(seed=11, temperature=2.0), torch.zeros(1, VOCAB)
    tokens = []
    for start, length in ((0, 30), (7, 23), (29, 1)):
        engine, request = Engine(1, VOCAB), Request(list(range(30)), params)
        engine.load(0, request)
        plan = engine.plan([(0, request)])
        plan.starts, plan.query_lens, plan.num_decode = np.array([start]), np.array([length]), 0
        engine.state.load(plan.loads[0])
        tokens.append(engine.sampler.sample(logits.clone(), engine.sampler.prepare(plan)).tokens.item())
    assert len(set(tokens)) == 1


def test_seeds_choices_and_positions_give_different_texts():
    def text(seed, choice):
        return tuple(generate_alone(Request([1], SamplingParams(seed=seed, temperature=2.0), choice), 6))

    keys = [(0, 0), (1, 0), (-1, 0), (0, 1), (2**32, 0), (2**63 - 1, 0), (-(2**63), 0)]
    assert len({text(*key) for key in keys}) == len(keys)
    assert text(5, 2) == text(5, 2)


def test_requests_without_a_seed_differ():
    request = Request([1], SamplingParams(temperature=2.0))
    assert generate_alone(request, 8) != generate_alone(request, 8)


def poison(engine: Engine, rng: random.Random) -> None:
    """Fill everything a slot remembers with what an old request could have left there."""
    state = engine.state
    state.floats.fill_(torch.nan)
    state.streams.random_(-(2**31), 2**31 - 1)
    state.top_ks.fill_(1)
    for tensor, top in zip(state.statistics, (2, 30_000), strict=True):
        tensor.copy_(torch.randint(top, tensor.shape))
    for slot in range(state.num_slots):
        everything = SamplingParams(
            seed=9,
            min_tokens=64,
            max_tokens=64,
            temperature=0.5,
            top_k=2,
            top_p=0.1,
            min_p=0.9,
            repetition_penalty=50.0,
            logit_bias={rng.randrange(VOCAB): 100.0 for _ in range(50)},
            stop_token_ids=tuple(range(100)),
            logprobs=20,
        )
        engine.load(slot, Request([1] * 40, everything, output=[2] * 40))
    engine.sampler.prepare(step_plan(step=0))
    for load in engine.loads:
        state.load(load)
    engine.loads.clear()


def test_a_reused_slot_gives_nothing_of_the_old_request_away():
    seed = fresh_seed()
    rng = random.Random(seed)
    for flushed in (False, True):
        requests = random_requests(rng, 8)
        expected = [generate_alone(request, 8) for request in requests]
        engine = Engine(8, VOCAB)
        poison(engine, rng)
        if flushed:
            engine.sampler.prepare(step_plan(step=0))
        rows = list(enumerate(requests))
        for slot, request in rows:
            engine.load(slot, request)
        for _ in range(8):
            outputs = engine.sample(rows, torch.stack([made_up_logits(request, VOCAB) for _, request in rows]))
        assert [request.output for request in requests] == expected
        asked = {row for row, request in rows if request.params.logprobs is not None}
        assert {row for row, _ in outputs.read_logprobs()} == asked


def test_a_step_in_flight_may_finish_in_a_slot_that_is_loaded_anew():
    """The engine finds out late that a request ended: the step after still runs its slot, then a new one takes it."""
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    new = Request([3, 4], params)
    expected = generate_alone(new, 6)
    engine, old = Engine(1, VOCAB), Request([5], params)
    engine.load(0, old)
    for _ in range(3):
        engine.sample([(0, old)], made_up_logits(old, VOCAB)[None])
    engine.load(0, new)
    for _ in range(6):
        engine.sample([(0, new)], made_up_logits(new, VOCAB)[None])
    assert new.output == expected


def test_long_histories_are_counted_whole():
    rng = np.random.default_rng(fresh_seed() % 2**32)
    prompt, output = rng.integers(0, VOCAB, 5000).tolist(), rng.integers(0, VOCAB, 3000).tolist()
    engine = Engine(3, VOCAB)
    request = Request(prompt, SamplingParams(presence_penalty=0.1), output=output)
    engine.load(1, request)
    plan = engine.plan([(1, request)])
    engine.state.load(plan.loads[0])
    engine.sampler.prepare(plan)
    seen, counts = engine.state.statistics
    assert counts[1].tolist() == np.bincount(output, minlength=VOCAB).tolist()
    assert set(seen[1].nonzero().flatten().tolist()) == set(prompt) | set(output)
    assert not counts[[0, 2]].any()
    assert not seen[[0, 2]].any()
